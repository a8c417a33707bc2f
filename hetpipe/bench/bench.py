"""Compares a pipeline's rate with the rate of each of its devices, and with the sum of their rates.

Every row trains on the same mini-batches. The rows take turns, and every second round reverses
their order. The figures are medians over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from hetpipe.bench.outcome import Linked, Outcome, Setting, own_members
from hetpipe.bench.peer import refusal
from hetpipe.bench.rows import AtOnceRow, Pace, PeerRow, PipelineRow, PlainRow, Row, Task
from hetpipe.capture.captured import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member, available_cores
from hetpipe.cluster.topology import Link
from hetpipe.crew.crew import Crew
from hetpipe.errors import PlanError
from hetpipe.pipeline.options import PlanOptions
from hetpipe.pipeline.planning import Planning
from hetpipe.plan.baselines import even_plan, link_blind_plan, speed_blind_plan
from hetpipe.plan.building import replicated_plan
from hetpipe.plan.planner import make_pipeline
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.profile.cache import fresh_costs
from hetpipe.profile.drift import drifts_since, probe_again
from hetpipe.profile.links import measure_links
from hetpipe.profile.measure import profile
from hetpipe.profile.probing import median_probe
from hetpipe.zoo.load import load_workload, optimizer_of

if TYPE_CHECKING:
    from hetpipe.cost.probe import Probe
    from hetpipe.cost.table import CostTable
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.simulate.timeline import Timeline

COUNTS = (8, 16)  # numbers of micro-batches that pipelines explore
STREAMS = (("pipedream", "stash"), ("pipedream", "pipeoptim"))  # asynchronous (schedule, weights)
FEWER = (2, 4)  # also explored by the rows `alone`, `parallel`, `auto` and `streams`
PLAIN_COUNTS = (1, 2, 4)  # for plain torch, which gains nothing from more micro-batches
PEER_COUNTS = (8, 16, 32)  # for torch's own pipeline


def run(setting: Setting, progress: Progress) -> Outcome:
    """Measure one setting. All its processes end, even after a `HetpipeError`."""
    if setting.twice is not None:
        setting.cluster.member(setting.twice)
    workload = load_workload(setting.model)
    rows = setting.mini_batch or workload.mini_batch
    progress(f"{setting.name}: capturing", 0, 1)
    example = next(workload.batches(rows, setting.seed))
    captured = Captured(workload.model, workload.loss_fn, example)
    task = Task(setting.model, workload, captured, setting.cluster, rows, setting.seed)
    with fresh_costs(), _open(task, setting, progress) as outcome:
        for turn in range(setting.rounds):
            progress(f"{setting.name}: measuring", turn, setting.rounds)
            for row in outcome.rows if turn % 2 == 0 else reversed(outcome.rows):
                row.measure()
        return replace(outcome, timelines=_timelines(outcome))


def _timelines(outcome: Outcome) -> tuple[Timeline, ...]:
    """Return the last step of the balanced pipelines, measured and predicted."""
    rows = {"": outcome.balanced}
    if outcome.linked is not None:
        rows[", slow link"] = outcome.linked.aware
    return tuple(
        replace(timeline, label=f"{outcome.setting.name}{where}; {timeline.label}")
        for where, row in rows.items()
        for timeline in (row.pipe.timeline, row.pipe.predicted)
    )


def _profile(task: Task, setting: Setting, progress: Progress) -> dict[int, CostTable]:
    """Return a table of costs for every micro-batch size of the rows."""
    counts = (setting.microbatches,) if setting.microbatches else (1, *FEWER, *COUNTS)
    sizes = sorted({-(-task.mini_batch // min(count, task.mini_batch)) for count in counts})
    with Crew.start(task.cluster) as crew:
        return profile(task.captured, crew, optimizer_of(task.workload), sizes[::-1], progress)


def _over(link: Link, task: Task) -> Task:
    """Return the task on the same cluster with `link` between all devices."""
    pairs = map(frozenset, combinations(task.cluster.ids, 2))
    cluster = replace(task.cluster, links=dict.fromkeys(pairs, link))
    return _moved(task, cluster, {member: member for member in cluster.ids})


def _twin(task: Task, member: str) -> Task:
    """Return the task on two workers of a member's device, at the member's speed."""
    one = task.cluster.member(member)
    pair = _pair(task.cluster, one)
    members = tuple(replace(each, speed=one.speed) for each in pair.members)
    return _moved(task, replace(pair, members=members), dict.fromkeys(pair.ids, member))


def _pair(cluster: Cluster, one: Member) -> Cluster:
    """Return a cluster of two workers of a member's device, on its host."""
    if cluster.connections is None:
        return Cluster.local(devices=[one.device] * 2)
    return Cluster.on(cluster.connections, [f"{one.host}/{one.device}"] * 2, {})


def _moved(task: Task, cluster: Cluster, like: Mapping[str, str]) -> Task:
    """Return the task on another cluster, with the task's costs and newly measured links.

    New probes correct the costs, because two workers of one device share its speed. `like` maps
    each member of `cluster` to the member whose costs it gets.
    """
    tables = {}
    with Crew.start(cluster) as crew:
        links, overhead_s = measure_links(crew)
        for size, table in task.tables.items():
            devices = {member: table.devices[other] for member, other in like.items()}
            tables[size] = replace(table, devices=devices, links=links, step_overhead_s=overhead_s)
        now = _alike(probe_again(crew, next(iter(tables.values())), cluster.ids), like)
    for size, table in tables.items():
        tables[size] = table.drifted(drifts_since(table, now, len(cluster.ids)))
    return replace(task, cluster=cluster, tables=tables)


def _alike(probes: Mapping[str, Probe], like: Mapping[str, str]) -> dict[str, Probe]:
    """Give workers of one device the median of their probes, so that they get equal shares."""
    groups: dict[str, list[Probe]] = {}
    for member, probe in probes.items():
        groups.setdefault(like[member], []).append(probe)
    return {member: median_probe(groups[like[member]]) for member in probes}


R = TypeVar("R", bound=Row)


class _Rows:
    """Opens rows, one for each different plan; `stack` closes them."""

    def __init__(self, stack: ExitStack, setting: Setting, progress: Progress) -> None:
        self._stack = stack
        self._setting = setting
        self._progress = progress
        self._of_plan: dict[tuple[Any, ...], PipelineRow] = {}

    def open(self, name: str, row: Callable[[], R]) -> R:
        """Create a row. Report progress first, because the row's first steps may take a while."""
        self._progress(f"{self._setting.name}: {name}, first steps", 0, 1)
        return self._stack.enter_context(closing(row()))

    def pipeline(self, task: Task, name: str, plan: Plan) -> PipelineRow:
        """Return the row of a plan. A new plan gets a new row; an old row gets one more name."""
        key = (id(task), *_identity(plan))
        if key in self._of_plan:
            self._of_plan[key].name += f" = {name}"
        else:
            self._of_plan[key] = self.open(name, lambda: PipelineRow(task, name, plan))
        return self._of_plan[key]


@contextmanager
def _open(task: Task, setting: Setting, progress: Progress) -> Iterator[Outcome]:
    """Open all rows with their processes; compare losses of synchronous pipelines with torch's."""
    task.tables = _profile(task, setting, progress)
    progress(f"{setting.name}: planning", 0, 1)
    balanced = _balanced_plan(task, setting)
    task.pace = Pace.of(balanced.step_s, setting.steps)
    table = task.tables[-(-task.mini_batch // balanced.microbatches)]
    even, blind = (
        make(
            table, task.cluster.ids, mini_batch=task.mini_batch,
            microbatches=balanced.microbatches, schedule=balanced.schedule,
        )
        for make in (even_plan, speed_blind_plan)
    )  # fmt: skip
    without_peer = (
        "only the long form, --full, has it"
        if not setting.peer
        else refusal(task.workload, task.cluster, task.mini_batch, PEER_COUNTS)
    )
    replicated, without_parallel = _replicated(task)
    streams, without_streams = _stream_plans(task, setting)
    twin = None if setting.twice is None else _twin(task, setting.twice)
    with ExitStack() as stack:
        rows = _Rows(stack, setting, progress)
        alone = tuple(
            rows.pipeline(task, f"{member} alone", _alone_plan(task, member))
            for member in task.cluster.ids
        )
        yield Outcome(
            setting,
            task,
            plain=tuple(
                rows.open("plain torch", partial(PlainRow, task, cores, PLAIN_COUNTS))
                for cores in _plain_cores(task.cluster)
            ),
            peer=None
            if without_peer
            else rows.open("torch's own pipeline", lambda: PeerRow(task, PEER_COUNTS)),
            without_peer=without_peer,
            alone=alone,
            at_once=rows.open(AtOnceRow.name, partial(AtOnceRow, task, alone))
            if len(alone) > 1
            else None,
            even=rows.pipeline(task, "even split", even),
            blind=rows.pipeline(task, "best split ignoring speeds", blind),
            balanced=rows.pipeline(task, "balanced pipeline", balanced),
            auto=rows.pipeline(task, "auto", _auto_plan(task, setting)),
            streams=tuple(
                rows.pipeline(task, f"{plan.schedule}, {plan.weights}", plan) for plan in streams
            ),
            without_streams=without_streams,
            parallel=None
            if replicated is None
            else rows.pipeline(task, "data parallel", replicated),
            without_parallel=without_parallel,
            twice=None
            if twin is None
            else rows.pipeline(
                twin, f"two workers of {setting.twice}", _balanced_plan(twin, setting)
            ),
            twice_parallel=None if twin is None else _twice_parallel(rows, twin, setting),
            linked=_linked(rows, task, setting),
            timelines=(),
        )


def _stream_plans(task: Task, setting: Setting) -> tuple[list[Plan], str]:
    """Return asynchronous plans over all devices, or the reason why there are none."""
    if len(task.cluster.ids) < 2:
        return [], "there is one device"
    if setting.schedule != "auto":
        return [], "a schedule is given"
    ask = PlannerOptions(task.mini_batch)
    options = [replace(ask, schedules=(rule,), weights=weights) for rule, weights in STREAMS]
    try:
        plans = [make_pipeline(task.tables, task.cluster.ids, each) for each in options]
    except PlanError as error:
        return [], str(error)
    return plans, ""


def _auto_plan(task: Task, setting: Setting) -> Plan:
    """Return the plan that a pipeline chooses, given the setting's micro-batches and schedule."""
    captured = task.captured
    asked = PlanOptions(microbatches=setting.microbatches, schedule=setting.schedule)
    planning = Planning(
        captured.name, captured.layer_names, task.cluster, task.mini_batch,
        lambda sizes: {size: task.tables[size] for size in sizes if size in task.tables},
        whole_batch_statistics=bool(captured.updated_buffers),
    )  # fmt: skip
    return planning.choose(asked)[0]


def _twice_parallel(rows: _Rows, twin: Task, setting: Setting) -> PipelineRow | None:
    plan, _ = _replicated(twin)
    if plan is None:
        return None
    return rows.pipeline(twin, f"two workers of {setting.twice}, data parallel", plan)


def _replicated(task: Task) -> tuple[Plan | None, str]:
    """Return the plan with the whole model on each device, or the reason why there is none."""
    if len(task.cluster.ids) < 2:
        return None, "there is one device"
    if task.captured.updated_buffers:
        return None, "replicas' batch norms see fewer samples, so the training would differ"
    try:
        plan = replicated_plan(task.tables, task.cluster.ids, mini_batch=task.mini_batch)
    except PlanError as error:
        return None, str(error)
    return plan, ""


def _linked(rows: _Rows, task: Task, setting: Setting) -> Linked | None:
    if setting.link is None or len(task.cluster.ids) < 2:
        return None
    over = _over(setting.link, task)
    blind = link_blind_plan(
        _explored(over, setting), over.cluster.ids, mini_batch=over.mini_batch,
        schedules=_schedules(setting),
    )  # fmt: skip
    return Linked(
        blind=rows.pipeline(over, "slow link, planned as if it were free", blind),
        aware=rows.pipeline(over, "slow link, planned for it", _balanced_plan(over, setting)),
    )


def _identity(plan: Plan) -> tuple[Any, ...]:
    """Return a key of a plan; plans with equal keys run in the same way."""
    where = tuple((stage.devices, stage.shares) for stage in plan.stages)
    return where, plan.cuts, plan.schedule, plan.weights, plan.microbatches, plan.in_flight


def _balanced_plan(task: Task, setting: Setting) -> Plan:
    """Return the plan with the shortest predicted step among the plans that use every device."""
    options = PlannerOptions(task.mini_batch, schedules=_schedules(setting))
    return make_pipeline(_explored(task, setting), task.cluster.ids, options)


def _explored(task: Task, setting: Setting) -> dict[int, CostTable]:
    """Return the cost tables for the micro-batch sizes that pipelines explore."""
    counts = (setting.microbatches,) if setting.microbatches else COUNTS
    tables = task.tables.items()
    return {size: table for size, table in tables if -(-task.mini_batch // size) in counts}


def _schedules(setting: Setting) -> tuple[str, ...]:
    return ("gpipe", "1f1b") if setting.schedule == "auto" else (setting.schedule,)


def _alone_plan(task: Task, member: str) -> Plan:
    """Return the plan with the shortest predicted step for the whole model on one device."""
    return make_pipeline(
        task.tables, [member], PlannerOptions(task.mini_batch, schedules=("1f1b",))
    )


def _plain_cores(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return sets of cores: one core, each member's, all cores; of equally large sets only one."""
    everything = available_cores()
    shares = [everything[:1], *(m.cores for m in own_members(cluster) if m.cores), everything]
    return [min(s for s in shares if len(s) == n) for n in sorted({len(s) for s in shares})]
