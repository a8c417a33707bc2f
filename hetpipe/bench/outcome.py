"""Records of the benchmark: a setting, and the rows that were measured in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetpipe.bench.rows import AtOnceRow, PeerRow, PipelineRow, PlainRow, Row, Task
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Link

if TYPE_CHECKING:
    from hetpipe.simulate.timeline import Timeline


@dataclass(frozen=True)
class Setting:
    """The setting of one table of the benchmark.

    If `microbatches` is None, plans choose from several numbers of micro-batches. In each round,
    every row runs for `steps` steps; without `steps`, for as many as take about a second, but at
    most 4. `twice` names a member, and adds rows with two workers of its device. If there are
    several devices, `link` adds two rows with this link emulated between all devices. `peer` adds a
    row with torch's own pipeline.
    """

    name: str
    model: str
    cluster: Cluster
    mini_batch: int | None = None
    microbatches: int | None = None
    schedule: str = "auto"
    rounds: int = 4
    steps: int | None = None
    seed: int = 0
    twice: str | None = None
    link: Link | None = None
    peer: bool = True


def own_members(cluster: Cluster) -> list[Member]:
    """Return the members of this host."""
    connections = cluster.connections
    own = None if connections is None else connections.own.name
    return [member for member in cluster.members if own in (None, member.host)]


@dataclass(frozen=True)
class Linked:
    """Rows over an emulated link: one is planned for the link, one as if the link took no time."""

    aware: PipelineRow
    blind: PipelineRow


@dataclass(frozen=True)
class Outcome:
    """The rows of one setting, and timelines of the last steps of balanced pipelines.

    In `alone` each device trains the whole model while the other devices idle. In `at_once` all
    devices do this at the same time, and exchange nothing. `parallel` is data parallelism over all
    devices. `blind` is planned without speeds. `streams` are asynchronous pipelines. `auto` is the
    default plan. If `peer`, `parallel` or `streams` is missing, `without_peer`, `without_parallel`
    or `without_streams` has the reason. Equal plans share a row.
    """

    setting: Setting
    task: Task
    plain: tuple[PlainRow, ...]
    peer: PeerRow | None
    without_peer: str
    alone: tuple[PipelineRow, ...]
    at_once: AtOnceRow | None
    even: PipelineRow
    blind: PipelineRow
    balanced: PipelineRow
    auto: PipelineRow
    streams: tuple[PipelineRow, ...]
    without_streams: str
    parallel: PipelineRow | None
    without_parallel: str
    twice: PipelineRow | None
    twice_parallel: PipelineRow | None
    linked: Linked | None
    timelines: tuple[Timeline, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows in the order of the table."""
        peer = () if self.peer is None else (self.peer,)
        linked = () if self.linked is None else (self.linked.blind, self.linked.aware)
        at_once = () if self.at_once is None else (self.at_once,)
        pipelines = (self.even, self.blind, *self.together, self.auto, *self.streams)
        more = (*self.twins, *linked)
        every = (*self.plain, *peer, *self.alone, *at_once, *pipelines, *more)
        return tuple(dict.fromkeys(every))

    @property
    def together(self) -> tuple[PipelineRow, ...]:
        """The synchronous rows that divide the work among devices: balanced and data parallel."""
        return tuple(row for row in (self.balanced, self.parallel) if row is not None)

    @property
    def twins(self) -> tuple[PipelineRow, ...]:
        """The rows with two workers of one device: pipeline and data parallel."""
        return tuple(row for row in (self.twice, self.twice_parallel) if row is not None)

    @property
    def ideal(self) -> float:
        """The sum of the rates that the devices reach alone, in samples per second."""
        return sum(row.rate for row in self.alone)

    @property
    def sum_rate(self) -> float:
        """The sum of the devices' rates while all devices compute, as they do in a pipeline."""
        return self.ideal if self.at_once is None else self.at_once.rate

    @property
    def efficiency(self) -> float:
        """The balanced pipeline's rate over the ideal."""
        return self.balanced.rate / self.ideal

    @property
    def over_peer(self) -> float | None:
        """The balanced pipeline's rate over the rate of torch's own pipeline."""
        return None if self.peer is None else self.balanced.rate / self.peer.rate

    @property
    def twice_efficiency(self) -> float | None:
        """The rate of two workers on one device over twice the device's rate."""
        if self.twice is None:
            return None
        alone = next(r for r in self.alone if r.plan.devices[0] == self.setting.twice)
        return self.twice.rate / (2 * alone.rate)

    def over_all_cores(self, row: Row) -> float:
        """Return a row's rate over plain torch's rate on all cores."""
        return row.rate / max(self.plain, key=lambda row: row.threads).rate

    def over_plain(self) -> dict[str, float]:
        """Return the rate of each member alone over plain torch's rate, by member.

        Plain torch has as many threads as the member has cores. Members of other hosts, without
        cores or with an emulated speed have no ratio.
        """
        plain = {row.threads: row.rate for row in self.plain}
        ratios = {}
        here = own_members(self.task.cluster)
        for row in self.alone:
            member = self.task.cluster.member(row.plan.devices[0])
            if member in here and member.speed == 1.0 and len(member.cores) in plain:
                ratios[member.id] = row.rate / plain[len(member.cores)]
        return ratios

    def to_json(self) -> dict[str, Any]:
        """Return the figures, and every row with its lowest and highest rate."""
        plan = self.balanced.plan
        return {
            "name": self.setting.name,
            "model": self.setting.model,
            "mini_batch": self.task.mini_batch,
            "rounds": self.setting.rounds,
            "steps": self.task.pace.timed,
            "label": plan.label,
            "plain_samples_per_s": {str(row.threads): row.rate for row in self.plain},
            "peer_samples_per_s": None if self.peer is None else self.peer.rate,
            "over_peer": self.over_peer,
            "devices": [
                {"id": row.plan.devices[0], "samples_per_s": row.rate, "label": row.label}
                for row in self.alone
            ],
            "over_plain": self.over_plain(),
            "over_all_cores": self.over_all_cores(self.balanced),
            "twice": None
            if self.twice is None
            else {
                "device": self.setting.twice,
                "samples_per_s": self.twice.rate,
                "fill_limit": self.twice.plan.fill_limit,
                "efficiency": self.twice_efficiency,
                "over_all_cores": self.over_all_cores(self.twice),
            },
            "parallel_samples_per_s": None if self.parallel is None else self.parallel.rate,
            "twice_parallel_samples_per_s": None
            if self.twice_parallel is None
            else self.twice_parallel.rate,
            "ideal_samples_per_s": self.ideal,
            "even_samples_per_s": self.even.rate,
            "speed_blind_samples_per_s": self.blind.rate,
            "balanced_samples_per_s": self.balanced.rate,
            "linked": None
            if self.linked is None
            else {
                "aware_samples_per_s": self.linked.aware.rate,
                "blind_samples_per_s": self.linked.blind.rate,
            },
            "microbatches": plan.microbatches,
            "fill_limit": plan.fill_limit,
            "efficiency": self.efficiency,
            "predicted_step_s": plan.step_s,
            "auto_samples_per_s": self.auto.rate,
            "at_once_samples_per_s": None if self.at_once is None else self.at_once.rate,
            "streams": [
                {"name": row.name, "samples_per_s": row.rate, "of_sum": row.rate / self.sum_rate}
                for row in self.streams
            ],
            "measured_step_s": self.task.mini_batch / self.balanced.rate,
            "max_loss_rel_diff": self.balanced.difference,
            "plan": plan.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }
