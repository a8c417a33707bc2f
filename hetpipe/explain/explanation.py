"""Explanation: where the time of a training's step goes, and which change would save time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING

from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.explain.advice import LEAST_GAIN, Advice, advise, counted
from hetpipe.explain.page import Page
from hetpipe.explain.use import Activity, Traffic, Use, traffic
from hetpipe.html import lines_html
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import Tables, nearest_table
from hetpipe.plan.simulation import Simulation, simulate
from hetpipe.report.tables import Table, link_table, plain_text
from hetpipe.words import format_nbytes, format_s

if TYPE_CHECKING:
    from pathlib import Path

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.simulate.timeline import Timeline

WIDTH = 80
LEAST_NAMED = 0.02  # causes and changed speeds below this share are not named
LEAST_SHOWN = 0.005  # waits below this share of the step are not shown


@dataclass(frozen=True)
class Measured:
    """The facts of a training: a timeline, seconds of a step, and peaks of memory by stage.

    `step_s` is None if no whole mini-batch was timed. `losses` has pairs of a mini-batch's number
    and its loss.
    """

    timeline: Timeline
    step_s: float | None = None
    peak_nbytes: tuple[int, ...] = ()
    losses: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a device: predicted, at most allowed, and measured; None if not known."""

    predicted_nbytes: int | None
    limit_nbytes: int | None
    measured_nbytes: int | None


@dataclass(frozen=True)
class Explanation:
    """Where the time of a step goes. `str` gives a text, `to_html` writes a page with pictures.

    `devices` describes the measured timeline, or the predicted one before the first step.
    `costs` are the present costs. `advice` may be empty; then `why_no_advice` says why.
    """

    plan: Plan
    devices: tuple[Use, ...]
    transfers: tuple[Traffic, ...]
    memory: Mapping[str, DeviceMemory]
    costs: CostTable | None
    simulation: Simulation | None
    """The predicted step; None without costs."""
    measured: Measured | None
    """None before the first step."""
    advice: tuple[Advice, ...]
    why_no_advice: str

    @property
    def timelines(self) -> dict[str, Timeline]:
        """The measured and the predicted timeline, by label; only known ones."""
        known = [] if self.measured is None else [self.measured.timeline]
        known += [] if self.simulation is None else [self.simulation.timeline]
        return {timeline.label: timeline for timeline in known}

    @property
    def slowdowns(self) -> dict[str, float]:
        """By device, the factor by which passes take longer while the others compute."""
        return {} if self.costs is None else _slowdowns(self.plan, self.costs)

    @property
    def contention(self) -> float:
        """The share of the cores that other work used while costs were measured; 0 if small."""
        return 0.0 if self.costs is None else self.costs.contention

    @property
    def predicted_s(self) -> float | None:
        """Seconds of a step by the present costs; None without costs."""
        return None if self.simulation is None else self.simulation.step_s

    @property
    def measured_s(self) -> float | None:
        """The median of the latest mini-batches, in seconds; None before the first step."""
        return None if self.measured is None else self.measured.step_s

    @property
    def bottleneck(self) -> str:
        """The device that computes most, and the largest loss of any device; one sentence."""
        if not self.devices:
            return "unknown, because nothing was measured or predicted"
        top = max(self.devices, key=lambda use: use.computing)
        text = f"{top.device} computes for {_percent(top.computing)} of the step"
        device, loss, share = max(self._losses(), key=lambda each: each[2])
        if share < LEAST_NAMED:
            return f"{text}, and no device loses {_percent(LEAST_NAMED)} of it for one cause"
        return f"{text}; the largest loss is {_percent(share)}, in which {device} {loss}"

    def _losses(self) -> Iterator[tuple[str, str, float]]:
        """Yield each device with each cause and its share."""
        for use in self.devices:
            yield from ((use.device, f"waits for {what}", s) for what, s in use.waits.items())
            yield use.device, "receives messages", use.receiving
            yield use.device, "sums gradients over replicas", use.summing
            yield use.device, "waits for hetpipe's own work or the end of the step", use.rest

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        parts = [table._repr_html_() for table in self.tables()]
        return lines_html([self.title, self.step, *self.sentences()]) + "".join(parts)

    def to_html(self, path: str | Path) -> None:
        """Write a page with a timeline to zoom, for any browser; it needs no network."""
        self.page().write(path)

    def page(self) -> Page:
        """Return the contents of the page."""
        tables = self.tables()
        if self.costs is not None and self.costs.links:
            tables.append(link_table(self.costs))
        outcome = None if self.simulation is None else self.simulation.outcome
        return Page(
            self.title,
            [self.step, *self.sentences()],
            tables,
            self.plan,
            self.timelines,
            dict(zip(outcome.workers, outcome.memory, strict=True)) if outcome else {},
            () if self.measured is None else self.measured.losses,
        )

    def _lines(self) -> Iterator[str]:
        for line in (self.title, self.step):
            yield fill(line, WIDTH)
        for table in self.tables():
            yield ""
            yield plain_text(table, WIDTH)
        yield ""
        for line in self.sentences():
            yield fill(line, WIDTH, subsequent_indent="  ")

    @property
    def title(self) -> str:
        """The model, the schedule and the mini-batch."""
        plan = self.plan
        return (
            f"{plan.model}: {plan.schedule}, {counted(plan.microbatches)} of a mini-batch of "
            f"{plan.mini_batch}"
        )

    def sentences(self) -> Iterator[str]:
        """Yield notes, the bottleneck and the advice."""
        yield from self._notes()
        yield f"bottleneck: {self.bottleneck}"
        yield from (f"advice: {one}" for one in self.advice)
        if not self.advice:
            yield f"no advice: {self.why_no_advice}"

    @property
    def step(self) -> str:
        """The measured and the predicted step; one sentence."""
        measured_s, predicted_s = self.measured_s, self.predicted_s
        if self.measured is None:
            if predicted_s is None:
                return "a step was neither measured nor predicted: train, or give priced=True"
            return f"a step takes {format_s(predicted_s)}, predicted; nothing was measured yet"
        text = "no whole step was timed"
        if measured_s is not None:
            text = f"a step takes {format_s(measured_s)}, {self.measured.timeline.label}"
        if predicted_s is None:
            return f"{text}, and was not predicted"
        if measured_s is None:
            return f"{text}; {format_s(predicted_s)} predicted by the present costs"
        error = predicted_s / measured_s - 1
        return (
            f"{text}; {format_s(predicted_s)} predicted by the present costs ({100 * error:+.0f} %)"
        )

    def tables(self) -> list[Table]:
        """Return the tables of devices, waits, memory and transfers."""
        tables = [*self._uses(), self._memory()]
        if self.transfers:
            tables.append(self._transfers())
        return tables

    def _notes(self) -> Iterator[str]:
        """Yield the slowdowns of devices by other work."""
        for device, factor in self.slowdowns.items():
            yield f"note: {device} takes {factor:.2f} times as long while other devices compute"
        if self.contention:
            yield (
                f"note: other work used {_percent(self.contention)} of the cores while costs were "
                "measured"
            )

    @property
    def _label(self) -> str:
        return "predicted" if self.measured is None else self.measured.timeline.label

    def _uses(self) -> Iterator[Table]:
        if not self.devices:
            return
        label = self._label
        columns = ("device", "layers", "computes", "receives", "sums", "waits", "rest")
        table = Table(f"Shares of a step, {label}", columns, columns[2:])
        for use in self.devices:
            parts = use.computing, use.receiving, use.summing, use.waiting, use.rest
            table.add_row(use.device, self._layers(use.device), *map(_percent, parts))
        yield table
        waits = Table(f"Waits, {label}", ("device", "waits for", "share"), {"share"}, keys=2)
        for use in self.devices:
            for cause, share in sorted(use.waits.items(), key=lambda item: -item[1]):
                if share >= LEAST_SHOWN:
                    waits.add_row(use.device, cause, _percent(share))
        if waits.rows:
            yield waits

    def _layers(self, device: str) -> str:
        own = [stage for stage in self.plan.stages if device in stage.devices]
        return ", ".join(f"{stage.lo}-{stage.hi - 1}" for stage in own)

    def _memory(self) -> Table:
        columns = ("device", "predicted", "measured", "limit")
        table = Table("Most memory", columns, columns[1:])
        for device, memory in self.memory.items():
            sizes = memory.predicted_nbytes, memory.measured_nbytes, memory.limit_nbytes
            table.add_row(device, *("?" if n is None else format_nbytes(n) for n in sizes))
        return table

    def _transfers(self) -> Table:
        columns = ("from", "to", "bytes", "under way", "share")
        table = Table(f"Transfers in a step, {self._label}", columns, columns[2:], keys=2)
        for each in self.transfers:
            seconds, share = each.seconds, each.share
            table.add_row(
                each.source, each.target, format_nbytes(each.nbytes),
                "?" if seconds is None else format_s(seconds),
                "?" if share is None else _percent(share),
            )  # fmt: skip
        return table


def explain(
    plan: Plan,
    costs: CostTable | Tables,
    *,
    measured: Measured | None = None,
    cluster: Cluster | None = None,
) -> Explanation:
    """Explain a plan by costs: one table, or tables by the samples of a micro-batch.

    More sizes allow advice about the number of micro-batches. `costs` may be empty. With a
    `cluster`, messages share its buses and uplinks.
    """
    tables = {costs.samples: costs} if isinstance(costs, CostTable) else costs
    table = nearest_table(tables, plan) if tables else None
    simulation, why_not = None, "the costs of this plan are unknown"
    advice: tuple[Advice, ...] = ()
    if table is not None and set(plan.all_devices) <= table.devices.keys():
        simulation = simulate(plan, table, cluster)
        advice, why_not = _advice(plan, tables)
    timeline = simulation.timeline if simulation else None
    if measured is not None:
        timeline = measured.timeline
    activity = None if timeline is None else Activity(timeline, plan)
    made = Explanation(
        plan,
        () if activity is None else activity.uses(),
        (),
        _memory_of(plan, simulation, measured),
        table if simulation else None,
        simulation,
        measured,
        advice,
        why_not,
    )
    step_s = made.predicted_s if measured is None else made.measured_s
    return replace(made, transfers=traffic(plan, activity, step_s))


def _advice(plan: Plan, tables: Tables) -> tuple[tuple[Advice, ...], str]:
    try:
        advice = advise(plan, tables)
    except HetpipeError as error:
        return (), f"the plan cannot be priced: {error}"
    return advice, f"no plan near this one saves {100 * LEAST_GAIN:.0f} % or more, predicted"


def _slowdowns(plan: Plan, table: CostTable) -> dict[str, float]:
    """Return the factors above 1 for the plan's devices, if the plan has several."""
    devices = dict.fromkeys(plan.all_devices)
    if len(devices) == 1:
        return {}
    share = (len(devices) - 1) / (len(table.devices) - 1)
    alone = {id: table.devices[id].alone for id in devices}
    factors = {id: 1 + share * (1 / factor - 1) for id, factor in alone.items()}
    return {id: factor for id, factor in factors.items() if factor >= 1 + LEAST_NAMED}


def _memory_of(
    plan: Plan, simulation: Simulation | None, measured: Measured | None
) -> dict[str, DeviceMemory]:
    """Return the bytes of each device, by the sums of its stages."""
    peaks = () if measured is None else measured.peak_nbytes
    found = {}
    for device in dict.fromkeys(plan.all_devices):
        numbers = [n for n, stage in enumerate(plan.stages) if device in stage.devices]
        own = [plan.stages[number] for number in numbers]
        found[device] = DeviceMemory(
            sum(stage.memory_nbytes for stage in own) if simulation else None,
            min(stage.capacity_nbytes for stage in own) or None,
            sum(peaks[number] for number in numbers) if peaks else None,
        )
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
