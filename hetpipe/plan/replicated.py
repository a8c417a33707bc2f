"""Data parallelism as a plan: the whole model on every device, rows divided by speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import check_able, label_of

BEYOND = 1.25
"""How far above the largest measured micro-batch the line through the last two is trusted."""


def replicated_plan(
    tables: Mapping[int, CostTable],
    devices: Sequence[str],
    *,
    mini_batch: int,
    microbatches: int | None = None,
) -> Plan:
    """The quickest predicted plan with one stage, a replica on each of `devices`.

    A step is the slowest replica's passes, an all-reduce and an update. `tables` by micro-batch
    size; times of other sizes lie on lines between them. Raises `PlanError` if no numbers of rows
    lie within the measured sizes, or a device cannot run the model.
    """
    most = mini_batch // max(len(devices), 1)  # a row for everyone
    counts = [microbatches] if microbatches else [2**k for k in range(most.bit_length())]
    found = [
        plan
        for count in counts
        for plan in [_with(tables, tuple(devices), mini_batch, count)]
        if plan is not None
    ]
    if len(devices) < 2 or not found:
        raise PlanError(
            f"no data-parallel plan for {', '.join(devices) or 'no device'}: there must be two or "
            f"more, and their shares of a mini-batch of {mini_batch} lie between the measured "
            f"sizes {min(tables)} and {max(tables)}; profile others, or use a pipeline"
        )
    best = min(found, key=lambda plan: plan.step_s)
    check_able(best, next(iter(tables.values())))
    return best


def _with(
    tables: Mapping[int, CostTable], devices: tuple[str, ...], mini_batch: int, microbatches: int
) -> Plan | None:
    """The plan with so many micro-batches; None if its sizes were not measured."""
    samples = -(-mini_batch // microbatches)
    times = {device: _Times(tables, device) for device in devices}
    rows = _rows(times, samples)
    if rows is None:
        return None
    table = tables[min(tables, key=lambda size: abs(size - samples // len(devices)))]
    layers = len(table.layers)
    slowest = max(devices, key=lambda device: sum(times[device].at(rows[device])))
    forward_s, backward_s = times[slowest].at(rows[slowest])
    update_s = max(table.update_s(device, 0, layers) for device in devices)
    reduce_s = _all_reduce_s(table, devices)
    costs = StageCosts(table)
    stage = StagePlan(
        0, layers, devices, 1, forward_s, backward_s, update_s,
        int(costs.memory_nbytes(0, layers, 1)),
        min(table.devices[device].memory_nbytes for device in devices),
        tuple(float(rows[device]) for device in devices),
        reduce_s,
    )  # fmt: skip
    both_s = microbatches * (forward_s + backward_s)
    return Plan(
        table.model,
        tuple(layer.name for layer in table.layers),
        (stage,),
        "1f1b",
        mini_batch,
        microbatches,
        both_s + reduce_s + update_s + table.step_overhead_s,
        (),
        label_of(table, devices),
        "data-parallel",
    )


class _Times:
    """Forward and backward of the whole model on a device, by rows."""

    def __init__(self, tables: Mapping[int, CostTable], device: str) -> None:
        self.sizes = sorted(tables)
        layers = [(tables[size], len(tables[size].layers)) for size in self.sizes]
        self._forward_s = [table.forward_s(device, 0, count) for table, count in layers]
        self._backward_s = [table.backward_s(device, 0, count) for table, count in layers]

    def at(self, rows: int) -> tuple[float, float]:
        """Seconds for so many rows."""
        return self._line(rows, self._forward_s), self._line(rows, self._backward_s)

    def _line(self, rows: int, times_s: Sequence[float]) -> float:
        if rows > self.sizes[-1] and len(self.sizes) > 1:
            slope = (times_s[-1] - times_s[-2]) / (self.sizes[-1] - self.sizes[-2])
            return times_s[-1] + slope * (rows - self.sizes[-1])
        return float(np.interp(rows, self.sizes, times_s))


def _rows(times: Mapping[str, _Times], samples: int) -> dict[str, int] | None:
    """Rows for each device so that the slowest ends first, by moving rows one at a time."""
    least, most = (f(next(iter(times.values())).sizes) for f in (min, max))
    share, over = divmod(samples, len(times))
    rows = {device: share + (index < over) for index, device in enumerate(times)}

    def end_s(device: str, more: int = 0) -> float:
        return sum(times[device].at(rows[device] + more))

    while True:
        slowest = max(times, key=end_s)
        quickest = min(times, key=lambda device: end_s(device, 1))
        if end_s(quickest, 1) >= end_s(slowest) or rows[slowest] <= 1:
            break
        rows[slowest] -= 1
        rows[quickest] += 1
    within = all(least <= count <= BEYOND * most for count in rows.values())
    return rows if within else None


def _all_reduce_s(table: CostTable, devices: Sequence[str]) -> float:
    """Every gradient goes to every other replica, and is summed and put back on each."""
    nbytes = sum(layer.params_nbytes for layer in table.layers)
    seconds = []
    for here in devices:
        links = [table.link(here, there) for there in devices if there != here]
        seconds.append(2 * sum(link.latency_s + nbytes / link.bandwidth_Bps for link in links))
    return max(seconds)
