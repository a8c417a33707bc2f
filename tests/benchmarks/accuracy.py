"""Predicted steps against measured steps: `python -m benchmarks.accuracy [--json FILE]`.

Models run on devices of this machine, over emulated links of 1 and 10 Gb/s. The devices are slower
than the machine, so that up to four workers do not compete for cores. Paced devices
(`benchmarks.paced`) take modelled times, so only hetpipe can cause errors of their predictions.
Held-back devices run at 0.45 of their speed or less, which also stretches the noise of this
machine. The benchmark profiles each setting once. Then plans with different partitions, schedules
and micro-batches run some steps each. Each step is compared with its prediction, which is corrected
for device drift.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.paced import PacedOpenCL, PacedTorch
from hetpipe.capture.captured import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.topology import Link
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.files import write_json
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, single_device_groups
from hetpipe.profile.cache import fresh_costs
from hetpipe.profile.clock import half_width_s
from hetpipe.profile.drift import mean_correction
from hetpipe.profile.measure import profile
from hetpipe.report.tables import Table
from hetpipe.sdk.host.registry import register_backend
from hetpipe.train.training import one_thread, train
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload

TORCH, OPENCL = "pytorch:cpu:0", "opencl:pocl:0"
CLUSTERS: dict[str, tuple[tuple[tuple[str, float], ...], ...]] = {
    "paced": tuple(
        tuple((device, 1.0) for device in devices)
        for devices in accumulate(
            [
                (f"paced-pytorch:even:{TORCH}", f"paced-opencl:slow:{OPENCL}"),
                (f"paced-pytorch:memory:{TORCH}",),
                (f"paced-opencl:arithmetic:{OPENCL}",),
            ]
        )
    ),
    "held-back": (
        ((TORCH, 0.45), (OPENCL, 0.4)),
        ((TORCH, 0.25), (TORCH, 0.2), (OPENCL, 0.3)),
        ((TORCH, 0.25), (TORCH, 0.2), (TORCH, 0.15), (OPENCL, 0.25)),
    ),
}
"""Clusters of two to four workers; each worker is a device and a share of the device's speed."""
BANDWIDTHS_Gbps = (1, 10)
LATENCY_S = 1e-4
HALF_S = 2.0
"""Seconds of each half of a profile, as held-back devices make few rounds of probes per second."""
SAMPLES = {"digits": 128, "gpt": 16}
"""Samples of a mini-batch: passes take at least 10 ms, and steps less than 2 s."""
COUNTS = (4, 8, 16)
WARM_UP, TIMED = 1, 5


@dataclass(frozen=True)
class Measured:
    """A plan in a setting: its predicted step, and its steps, corrected for drift and measured."""

    devices: str  # "paced" or "held-back"
    model: str
    workers: int
    bandwidth_Gbps: int
    planner: str
    schedule: str
    microbatches: int
    cuts: tuple[int, ...]
    predicted_s: float
    corrected_steps_s: tuple[float, ...]
    steps_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """The relative error of the corrected predictions, as the median over all steps."""
        pairs = zip(self.corrected_steps_s, self.steps_s, strict=True)
        return statistics.median(corrected_s / step_s for corrected_s, step_s in pairs) - 1

    @property
    def corrected_s(self) -> float:
        """The prediction of the median step that has the error `error`."""
        return self.measured_s * (1 + self.error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all settings and print the errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--devices", action="append", choices=CLUSTERS, help="default: all")
    parser.add_argument("--model", action="append", choices=SAMPLES, help="default: all")
    parser.add_argument("--workers", type=int, action="append", help="default 2, 3, 4")
    parser.add_argument("--json", type=Path, help="write all plans and their figures")
    chosen = parser.parse_args(arguments)
    console = Console()
    rows: list[Measured] = []
    for backend in (PacedTorch, PacedOpenCL):
        register_backend(backend)
    for setting in settings(chosen.devices, chosen.model, chosen.workers):
        for row in measure(setting):
            rows.append(row)
            figures = 1e3 * row.corrected_s, 1e3 * row.measured_s, 100 * row.error
            times = "predicted {:.1f} ms, measured {:.1f} ms, {:+.1f} %".format(*figures)
            console.print(f"{setting}, {row.planner}: {times}")
        if chosen.json:
            write_json(chosen.json, {"rows": [asdict(row) for row in rows]})
    for devices in dict.fromkeys(row.devices for row in rows):
        report(console, devices, [row for row in rows if row.devices == devices])


class Setting(NamedTuple):
    """A model on a cluster."""

    devices: str
    model: str
    members: tuple[tuple[str, float], ...]
    bandwidth_Gbps: int

    def __str__(self) -> str:
        workers = f"{len(self.members)} {self.devices} workers"
        return f"{self.model} on {workers} at {self.bandwidth_Gbps} Gb/s"


def settings(
    devices: Sequence[str] | None, models: Sequence[str] | None, workers: Sequence[int] | None
) -> Iterator[Setting]:
    """Yield the settings with these kinds of devices, models and workers; None means all."""
    for setting in product(devices or CLUSTERS, models or SAMPLES, range(3), BANDWIDTHS_Gbps):
        own, model, place, bandwidth_Gbps = setting
        members = CLUSTERS[own][place]
        if not workers or len(members) in workers:
            yield Setting(own, model, members, bandwidth_Gbps)


def measure(setting: Setting) -> Iterator[Measured]:
    """Measure each plan of a setting in some steps."""
    workload, samples = load_workload(setting.model), SAMPLES[setting.model]
    cluster = cluster_of(setting.members, setting.bandwidth_Gbps)
    captured = Captured(
        workload.model, workload.loss_fn, next(workload.batches(samples, 0)),
        samples=-(-samples // COUNTS[0]),
    )  # fmt: skip
    with one_thread(), fresh_costs(), closing(Crew.start(cluster)) as crew:
        sizes = [-(-samples // count) for count in COUNTS]
        tables = profile(captured, crew, optimizer_of(workload), sizes, half_s=HALF_S)
        tried = plans(tables, cluster, samples)
        for plan in [*tried, tried[0]]:  # the first plan runs twice, to show its variation
            costs = tables[-(-samples // plan.microbatches)]
            yield Measured(
                setting.devices, workload.name, len(cluster.ids), setting.bandwidth_Gbps,
                plan.origin, plan.schedule, plan.microbatches, plan.cuts, plan.step_s,
                *steps_of(workload, captured, crew, plan, costs),
            )  # fmt: skip


def plans(tables: dict[int, CostTable], cluster: Cluster, samples: int) -> list[Plan]:
    """Return the plan of the planner `auto`, and plans with other cuts, schedules and sizes."""
    options = PlannerOptions(samples, COUNTS, replicas=False)
    priced = Priced(tables, options)
    layers, stages = len(tables[min(tables)].layers), len(cluster.ids)
    even = tuple(round(layers * n / stages) for n in range(1, stages))
    chosen = [planned(tables, cluster, options)]
    exact = planned(
        tables, cluster, PlannerOptions(samples, COUNTS[1:2], free_order=False), "exact"
    )
    late = tuple(min(cut + 1, layers - stages + place) for place, cut in enumerate(exact.cuts, 1))
    others = {
        (exact.cuts, "1f1b", 8), (exact.cuts, "gpipe", 4), (late, "1f1b", 8), (even, "gpipe", 16)
    }  # fmt: skip
    for cuts, schedule, count in sorted(others):
        members = cluster.ids[: len(cuts) + 1]
        try:
            proposal = Proposal(cuts, single_device_groups(members), schedule, count)
            chosen.append(priced.plan(proposal, f"{schedule} x {count}, cuts {list(cuts)}"))
        except HetpipeError:
            continue  # the devices cannot run this plan
    return chosen


def cluster_of(speeds: Sequence[tuple[str, float]], bandwidth_Gbps: int) -> Cluster:
    """Return a cluster of workers at these speeds, with an emulated link between each pair."""
    names = [device for device, _ in speeds]
    members = [
        replace(member, speed=speed)
        for member, (_, speed) in zip(Cluster.local(devices=names).members, speeds, strict=True)
    ]
    link = Link(LATENCY_S, bandwidth_Gbps * 1e9 / 8)
    pairs = combinations([member.id for member in members], 2)
    return Cluster(tuple(members), {frozenset(pair): link for pair in pairs})


def steps_of(
    workload: Workload, captured: Captured, crew: Crew, plan: Plan, costs: CostTable
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of each step: predicted with the probes around the step, and measured."""
    example = next(workload.batches(plan.mini_batch, 0))
    with Pipeline(
        workload.model, workload.loss_fn, example, cluster=crew.cluster, crew=crew,
        optimizer=optimizer_of(workload), plan=plan, costs=costs, captured=captured,
    ) as pipe:  # fmt: skip
        for _ in train(workload, pipe, WARM_UP, seed=0):
            pass
        corrections, steps_s = [pipe.corrected()], []
        for step in train(workload, pipe, TIMED, seed=0):
            steps_s.append(step.time_s)
            corrections.append(pipe.corrected())
    around_s = [mean_correction(pair).corrected_s for pair in pairwise(corrections)]
    return tuple(around_s), tuple(steps_s)


def report(console: Console, devices: str, rows: Sequence[Measured]) -> None:
    """Print median and worst errors, the rank correlation, and auto's step over the best step."""
    errors = [abs(row.error) for row in rows]
    raw = [abs(row.predicted_s / row.measured_s - 1) for row in rows]
    repeats = [half_width_s(row.steps_s) / row.measured_s for row in rows]
    groups: dict[tuple[str, int, int], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.model, row.workers, row.bandwidth_Gbps), []).append(row)
    table = Table(
        f"{len(rows)} plans, {devices} devices, emulated links", ["figure", "value"], ["value"]
    )
    table.add_row("median error, corrected", f"{100 * statistics.median(errors):.1f} %")
    table.add_row("worst error, corrected", f"{100 * max(errors):.1f} %")
    table.add_row("median error, as planned", f"{100 * statistics.median(raw):.1f} %")
    table.add_row("worst error, as planned", f"{100 * max(raw):.1f} %")
    table.add_row(
        "half the distance between a plan's quartiles, median",
        f"{100 * statistics.median(repeats):.1f} %",
    )
    ranks = rank_correlation([row.corrected_s for row in rows], [row.measured_s for row in rows])
    table.add_row("rank correlation, all plans", f"{ranks:.3f}")
    for (model, workers, bandwidth_Gbps), group in groups.items():
        best_s = min(row.measured_s for row in group)
        auto = next(row for row in group if row.planner == "auto")
        name = f"auto over the best, {model} on {workers} at {bandwidth_Gbps} Gb/s"
        table.add_row(name, f"{auto.measured_s / best_s:.3f}")
    console.print(table)


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation of series without ties; 1 for fewer than two values."""
    count = len(left)
    if count < 2:
        return 1.0
    ranks = [
        {place: rank for rank, place in enumerate(sorted(range(count), key=series.__getitem__))}
        for series in (left, right)
    ]
    differences = sum((ranks[0][place] - ranks[1][place]) ** 2 for place in range(count))
    return 1 - 6 * differences / (count * (count**2 - 1))


if __name__ == "__main__":
    main()
