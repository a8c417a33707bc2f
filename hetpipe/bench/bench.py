"""The heterogeneous benchmark: unlike devices as one pipeline, against each alone and their sum.

Every row trains the same mini-batches. Rows are measured in turn, round after round, the order
reversed each time, never two at once; what is compared is their medians.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hetpipe.bench.peer import refusal
from hetpipe.bench.rows import PeerRow, PipelineRow, PlainRow, Row, Task
from hetpipe.bench.zoo import load_workload, optimizer_of
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, available_cores
from hetpipe.cost import cache
from hetpipe.engine.crew import Crew
from hetpipe.engine.measure import profile
from hetpipe.plan.baselines import even_plan, speed_blind_plan
from hetpipe.plan.planner import explore, make_plan

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.engine.measure import Progress
    from hetpipe.plan.plan import Plan
    from hetpipe.simulate.timeline import Timeline

COUNTS = (8, 16, 32)  # micro-batches that pipelines explore
FEWER = (2, 4)  # and that rows of a single device may have as well
PLAIN_COUNTS = (1, 2, 4, 8)  # for plain torch, which gains nothing by more


@dataclass(frozen=True)
class Setting:
    """One table of the benchmark. `microbatches` None: explored for every row."""

    name: str
    model: str
    cluster: Cluster
    mini_batch: int | None = None
    microbatches: int | None = None
    schedule: str = "auto"
    rounds: int = 5
    steps: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The rows of one setting, and the timelines of the balanced pipeline's last step.

    Where there is no `peer`, `without_peer` is the reason.
    """

    setting: Setting
    task: Task
    plain: tuple[PlainRow, ...]
    peer: PeerRow | None
    without_peer: str
    alone: tuple[PipelineRow, ...]
    even: PipelineRow
    blind: PipelineRow
    balanced: PipelineRow
    timelines: tuple[Timeline, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows in the order of the table."""
        peer = () if self.peer is None else (self.peer,)
        return (*self.plain, *peer, *self.alone, self.even, self.blind, self.balanced)

    @property
    def ideal(self) -> float:
        """Sum of the devices' own rates, samples per second."""
        return sum(row.rate for row in self.alone)

    @property
    def efficiency(self) -> float:
        """The balanced pipeline's rate over the ideal."""
        return self.balanced.rate / self.ideal

    @property
    def over_peer(self) -> float | None:
        """The balanced pipeline's rate over the peer's."""
        return None if self.peer is None else self.balanced.rate / self.peer.rate

    def over_plain(self) -> dict[str, float]:
        """The engine on one device over plain torch with as many threads, by member.

        For members with cores of their own at their true speed.
        """
        plain = {row.threads: row.rate for row in self.plain}
        ratios = {}
        for row in self.alone:
            member = self.task.cluster.member(row.plan.devices[0])
            if member.speed == 1.0 and len(member.cores) in plain:
                ratios[member.id] = row.rate / plain[len(member.cores)]
        return ratios

    def to_json(self) -> dict[str, Any]:
        """The figures, and every row with its spread."""
        plan = self.balanced.plan
        return {
            "name": self.setting.name,
            "model": self.setting.model,
            "mini_batch": self.task.mini_batch,
            "rounds": self.setting.rounds,
            "steps": self.setting.steps,
            "label": plan.label,
            "plain_samples_per_s": {str(row.threads): row.rate for row in self.plain},
            "peer_samples_per_s": None if self.peer is None else self.peer.rate,
            "over_peer": self.over_peer,
            "devices": [
                {"id": row.plan.devices[0], "samples_per_s": row.rate, "label": row.label}
                for row in self.alone
            ],
            "over_plain": self.over_plain(),
            "ideal_samples_per_s": self.ideal,
            "even_samples_per_s": self.even.rate,
            "speed_blind_samples_per_s": self.blind.rate,
            "balanced_samples_per_s": self.balanced.rate,
            "microbatches": plan.microbatches,
            "fill_limit": plan.fill_limit,
            "efficiency": self.efficiency,
            "predicted_step_s": plan.step_s,
            "measured_step_s": self.task.mini_batch / self.balanced.rate,
            "max_loss_rel_diff": self.balanced.difference,
            "plan": plan.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }


def run(setting: Setting, progress: Progress) -> Outcome:
    """Measure one setting. Raises `HetpipeError`; no process is left in any case."""
    workload = load_workload(setting.model)
    rows = setting.mini_batch or workload.mini_batch
    progress(f"{setting.name}: capturing", 0, 1)
    example = next(workload.batches(rows, setting.seed))
    captured = Captured(workload.model, workload.loss_fn, example)
    task = Task(setting.model, workload, captured, setting.cluster, rows, setting.seed)
    with _fresh_costs(), _open(task, setting, progress) as outcome:
        for turn in range(setting.rounds):
            progress(f"{setting.name}: measuring", turn, setting.rounds)
            for row in outcome.rows if turn % 2 == 0 else reversed(outcome.rows):
                row.measure(setting.steps)
        pipe = outcome.balanced.pipe
        return replace(outcome, timelines=(pipe.timeline, pipe.predicted))


def _profile(task: Task, setting: Setting, progress: Progress) -> dict[int, CostTable]:
    """Tables for every micro-batch size that a row may have."""
    counts = (setting.microbatches,) if setting.microbatches else (*FEWER, *COUNTS)
    sizes = sorted({-(-task.mini_batch // min(count, task.mini_batch)) for count in counts})
    with Crew.start(task.cluster) as crew:
        return profile(task.captured, crew, optimizer_of(task.workload), sizes[::-1], progress)


@contextmanager
def _fresh_costs() -> Iterator[None]:
    """Costs are measured anew, once, and not taken from an earlier day's cache."""
    before = os.environ.get(cache.ENVIRONMENT)
    with TemporaryDirectory() as empty:
        os.environ[cache.ENVIRONMENT] = empty
        try:
            yield
        finally:
            del os.environ[cache.ENVIRONMENT]
            if before is not None:
                os.environ[cache.ENVIRONMENT] = before


@contextmanager
def _open(task: Task, setting: Setting, progress: Progress) -> Iterator[Outcome]:
    """All rows with their processes, each checked against torch."""
    tables = _profile(task, setting, progress)
    balanced = _balanced_plan(task, setting, tables)
    table = tables[-(-task.mini_batch // balanced.microbatches)]
    even, blind = (
        make(
            table, task.cluster.ids, mini_batch=task.mini_batch,
            microbatches=balanced.microbatches, schedule=balanced.schedule,
        )
        for make in (even_plan, speed_blind_plan)
    )  # fmt: skip
    with ExitStack() as stack:

        def opened(name: str, plans: Sequence[Plan]) -> PipelineRow:
            progress(f"{setting.name}: {name}, first steps", 0, 1)
            return stack.enter_context(closing(PipelineRow(task, name, plans)))

        plain = [
            stack.enter_context(closing(PlainRow(task, cores, PLAIN_COUNTS)))
            for cores in _plain_cores(task.cluster)
        ]
        peer: PeerRow | None = None
        without_peer = refusal(task.workload, task.cluster, task.mini_batch, COUNTS)
        if not without_peer:
            progress(f"{setting.name}: torch's own pipeline, first steps", 0, 1)
            peer = stack.enter_context(closing(PeerRow(task, COUNTS)))
        alone = [
            opened(f"{member} alone", _alone_plans(tables, member, task))
            for member in task.cluster.ids
        ]
        yield Outcome(
            setting,
            task,
            tuple(plain),
            peer,
            without_peer,
            tuple(alone),
            even=opened("even split", [even]),
            blind=opened("best split ignoring speeds", [blind]),
            balanced=opened("balanced pipeline", [balanced]),
            timelines=(),
        )


def _balanced_plan(task: Task, setting: Setting, tables: dict[int, CostTable]) -> Plan:
    """The quickest predicted plan that uses every device."""
    counts = (setting.microbatches,) if setting.microbatches else COUNTS
    explored = {
        size: table for size, table in tables.items() if -(-task.mini_batch // size) in counts
    }
    schedules = ("gpipe", "1f1b") if setting.schedule == "auto" else (setting.schedule,)
    return explore(
        explored, task.cluster.ids, mini_batch=task.mini_batch, schedules=schedules, use_all=True
    )[0]


def _alone_plans(tables: dict[int, CostTable], member: str, task: Task) -> list[Plan]:
    """The whole model on one device, for every micro-batch size."""
    return [
        make_plan(
            table, [member], mini_batch=task.mini_batch, microbatches=-(-task.mini_batch // size)
        )
        for size, table in tables.items()
    ]


def _plain_cores(cluster: Cluster) -> list[tuple[int, ...]]:
    """One core, as many as each member has, and all."""
    everything = available_cores()
    shares = [everything[:1], *(m.cores for m in cluster.members if m.cores), everything]
    return [min(s for s in shares if len(s) == n) for n in sorted({len(s) for s in shares})]
