"""The operators of a model that a device lacks, and the operators that a companion lends it.

A missing operator has its share of the model's time, modelled on the board `JUDGE`. A lent operator
has its cost: the measured seconds of its calls, with the copies to the companion and back.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.cost.board import board
from hetpipe.cost.gpu import kernels_s

if TYPE_CHECKING:
    from torch import fx

    from hetpipe.sdk.host.companion import CompanionDevice

RUNS = 4
"""How often a lent operator runs; only the shortest run counts, so the first is a warm-up."""
JUDGE = "desktop-cpu"
"""The board whose modelled seconds decide each operator's share of the time."""


@dataclass(frozen=True)
class Lacking:
    """An operator that a device refuses: its calls, its share of the model's time, and why."""

    operator: str
    calls: int
    share: float
    reason: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class LentCost:
    """An operator that a companion runs, with its calls in the model's programs.

    `nbytes` counts the copied bytes of all calls, `measured_s` the measured seconds of all calls
    and copies.
    """

    operator: str
    calls: int
    nbytes: int
    measured_s: float
    reason: str


@dataclass(frozen=True)
class Coverage:
    """The operators of a model that a device lacks or is lent, the most expensive ones first."""

    model: str
    device: str
    calls: int
    lacking: tuple[Lacking, ...]
    companion: str = ""
    lent: tuple[LentCost, ...] = ()

    @property
    def covered(self) -> float:
        """The share of the model's time in operators that the device has."""
        return 1 - sum(each.share for each in self.lacking)

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {
            "model": self.model,
            "device": self.device,
            "calls": self.calls,
            "covered": self.covered,
            "lacking": [vars(each) for each in self.lacking],
            "companion": self.companion,
            "lent": [vars(each) for each in self.lent],
        }


def coverage(model: str, device: str, mini_batch: int | None = None) -> Coverage:
    """Return the operators of a workload's forwards, backwards and updates that a device refuses.

    The model is captured in the operators of the device's backend. The device is opened, but runs
    only lent operators, on inputs of ones. Raises `HetpipeError` if there is no such model or
    device.
    """
    from hetpipe.profile.count import count_calls
    from hetpipe.sdk.graph import operator_name
    from hetpipe.sdk.host.companion import CompanionDevice
    from hetpipe.sdk.host.registry import decompositions_of, open_device
    from hetpipe.sdk.support import refusal
    from hetpipe.study.models import of_model
    from hetpipe.zoo.load import optimizer_of

    there = open_device(device)
    subject, judge = of_model(model, mini_batch), board(JUDGE)
    captured = subject.captured()
    samples = subject.samples
    count = len(captured.layer_graph(samples).layers)
    tables = [decompositions_of(there.info.backend)] * count
    stages = captured.stage_graphs(
        range(1, count), tables, [samples], optimizer_of(subject.workload), extras=()
    )
    calls, total_s = Counter[str](), 0.0
    seconds: dict[str, float] = defaultdict(float)
    reasons: dict[str, str] = {}
    layers: dict[str, dict[str, None]] = {}
    programs_all: list[fx.GraphModule] = []
    for stage in stages:
        passes = stage.passes[samples]
        programs = [passes.forward, passes.backward, stage.update]
        for program in (program for program in programs if program is not None):
            programs_all.append(program.graph)
            for node, kernel in count_calls(program.graph.graph):
                taken_s = kernels_s(judge, [kernel])
                total_s += taken_s
                reason = refusal(there, node)
                if reason is not None:
                    name = operator_name(node)
                    seconds[name] += taken_s
                    calls[name] += 1
                    reasons.setdefault(name, reason)
                    layers.setdefault(name, {})[str(node.meta.get("layer", "?"))] = None
            calls[""] += sum(1 for _ in count_calls(program.graph.graph))
    lacking = tuple(
        Lacking(name, calls[name], taken_s / total_s, reasons[name], tuple(layers[name]))
        for name, taken_s in sorted(seconds.items(), key=lambda item: -item[1])
    )
    companion, lent = "", list[LentCost]()
    if isinstance(there, CompanionDevice):
        companion, lent = there.companion.info.id, _lent(there, programs_all)
    return Coverage(captured.name, device, calls[""], lacking, companion, tuple(lent))


def _lent(device: CompanionDevice, graphs: Sequence[fx.GraphModule]) -> list[LentCost]:
    """Return the costs of the operators that the companion runs, the most expensive first."""
    from hetpipe.sdk.graph import graph_structure, operator_name
    from hetpipe.sdk.host.parts import part_of, units_of

    costs: dict[str, LentCost] = {}
    measured: dict[str, float] = {}
    for graph in graphs:
        for unit in units_of(graph):
            reason = device.lends(unit[0])
            part = part_of(graph, [unit]) if reason is not None else None
            if reason is None or part is None or device.supports(unit[0]) is not None:
                continue
            alike = repr(graph_structure(part.graph))
            if alike not in measured:
                measured[alike] = _seconds(device, part.graph)
            name = operator_name(unit[0])
            nbytes = sum(each.there_nbytes + each.back_nbytes for each in device.lent(part.graph))
            old = costs.get(name, LentCost(name, 0, 0, 0.0, reason))
            costs[name] = LentCost(
                name, old.calls + 1, old.nbytes + nbytes, old.measured_s + measured[alike], reason
            )
    return sorted(costs.values(), key=lambda each: -each.measured_s)


def _seconds(device: CompanionDevice, graph: fx.GraphModule) -> float:
    """Return the seconds of the shortest of `RUNS` runs of a graph on inputs of ones."""
    from hetpipe.sdk.inputs import input_forms

    arrays = [np.ones(shape, dtype) for shape, dtype in input_forms(graph)]
    buffers = [device.upload(array)[0] for array in arrays]
    executable = device.compile(graph)
    times_s = []
    for _ in range(RUNS):
        start_s = time.perf_counter()
        executable.run(buffers)[1].wait()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
