"""Survival: takes snapshots of a training, and continues it without devices that are lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.crew.copies import Copies, Kept
from hetpipe.crew.launcher import start_servers
from hetpipe.errors import ClusterError, HetpipeError, PlanError, WorkerError
from hetpipe.memory import available_nbytes
from hetpipe.pipeline.absent import Absent
from hetpipe.pipeline.changes import Joined, Lost
from hetpipe.pipeline.copied import check_budget, values_of
from hetpipe.pipeline.journal import Recorded
from hetpipe.pipeline.move import HORIZON, Move
from hetpipe.pipeline.resume import Progress
from hetpipe.pipeline.stuck import RECENT, stuck_after_s
from hetpipe.pipeline.survivors import (
    ErrorCount,
    MissingError,
    checked_plan,
    plan_for,
    priced_again,
    start_crew,
)
from hetpipe.plan.survival import best_updates
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.crew import Crew
    from hetpipe.pipeline.lossscale import ScaleState
    from hetpipe.pipeline.training import Training
    from hetpipe.plan.plan import Plan
    from hetpipe.wire.messages import Array

T = TypeVar("T")
MTBF_S = 3600.0
"""Assumed mean seconds between two losses."""
SHARE = 0.01
"""The most time of snapshots, as a share of the training."""
REPLAY_S = 1.0
"""Seconds of mini-batches that are trained again after a loss, if snapshots are cheap enough. On
fewer devices they take longer."""
LEAST_S = 1e-4
log = logging.getLogger("hetpipe")


@dataclass(frozen=True)
class Moment:
    """The state of a training at a snapshot, apart from the values on the devices."""

    position: int
    """In the journal."""
    steps: int
    updates: tuple[int, ...]
    plan: Plan
    scale: ScaleState
    not_finite: str | None
    unread: Mapping[str, Mapping[str, Array]]


def begin_survival(training: Training, renewed: Callable[[CostTable], None]) -> Survival | None:
    """Return the survival of a training that records its mini-batches, after a first snapshot; None
    for other trainings."""
    if not isinstance(training, Recorded):
        return None
    survival = Survival(training, renewed)
    survival.begin()
    return survival


def end_survival(survival: Survival | None) -> None:
    """End what runs beside a training's crew."""
    if survival is not None:
        survival.absent.close()


def set_speed(
    survival: Survival | None, present: Callable[[], Crew], member: str, speed: float
) -> None:
    """Emulate another speed on a member of the `present` crew, or on a lost one once it is back."""
    if survival is None:
        present().set_speed(member, speed)
    else:
        survival.absent.set_speed(present, member, speed)


class Survival:
    """Keeps a training alive. `renewed` is called with the costs of each new plan, before mini-
    batches are trained again.
    """

    def __init__(self, training: Recorded, renewed: Callable[[CostTable], None]) -> None:
        self._training, self._options = training, training.setup.survival
        self._renewed = renewed
        self.on_resumed: Callable[[], None] = lambda: None
        """Called once the recorded mini-batches are trained again."""
        self._copies = Copies()
        self.absent = Absent(training.setup.crew.cluster)
        self._first = self._plan = training.plan  # the latter: of the last snapshot or loss
        self._since = 0  # when the present workers began, or a checkpoint was restored
        self._begun = 0  # the number of mini-batches before the last snapshot
        self._errors = ErrorCount()
        self.lost: list[Lost] = []
        self.joined: list[Joined] = []
        given = self._options.snapshot_nbytes
        self._budget_nbytes = available_nbytes() // 2 if given is None else given
        self._copied_nbytes = 0
        training.begin_journal()

    def begin(self) -> None:
        """Take a snapshot that no loss before it needs, and wait for it. No mini-batch may be under
        way. Raises `HetpipeError` if two snapshots do not fit the memory."""
        setup = self._training.setup
        crew, batch_nbytes = setup.crew, setup.captured.example.nbytes
        self._copied_nbytes = crew.copied_nbytes
        is_given = self._options.snapshot_nbytes is not None
        check_budget(self.nbytes, batch_nbytes, self._budget_nbytes, is_given)
        self._since = self._training.steps
        self.snapshot()
        self._copies.wait(crew.check_copying)
        start_servers(crew.cluster, crew.infos)

    @property
    def nbytes(self) -> int:
        """The bytes of two snapshots: the latest one, and one that arrives."""
        return 2 * self._copied_nbytes

    @property
    def due(self) -> bool:
        """Whether a snapshot should be taken before the next mini-batch."""
        training = self._training
        if training.accumulated:
            return False
        self._moment(self._latest)
        self._limit_passes()
        since = training.mini_batches - self._begun
        is_full = since > 0 and self.nbytes + training.journal_nbytes > self._budget_nbytes
        return training.plan is not self._plan or is_full or since >= self._every()

    @property
    def join_pays(self) -> bool:
        """Whether members that are back should join before the next mini-batch."""
        training, setup = self._training, self._training.setup
        if training.accumulated or not self.absent.look(setup.crew.cluster):
            return False
        cluster, tables = self.absent.cluster(setup.crew.cluster), setup.tables
        model, sizes = setup.captured, training.sizes
        try:
            present = priced_again(training.plan, tables)
            best, _ = plan_for(model, cluster, self._first, present, tables, sizes)
        except PlanError:
            return False
        took_s = self.lost[-1].took_s if self.lost else 0.0
        return Move(present, best, took_s).pays(HORIZON)

    def rejoin(self, settle: Callable[[], None]) -> None:
        """Continue with members that are back, if that pays, once `settle` has ended all work."""
        if self.join_pays:
            settle()
            self.join()

    def join(self) -> None:
        """Continue with the members that are back. The training must be at rest."""
        training, begin_s = self._training, time.monotonic()
        crew, present = training.setup.crew, training.plan
        self.snapshot()
        self._copies.wait(crew.check_copying)
        cluster = self.absent.cluster(crew.cluster)
        members = tuple(id for id in cluster.ids if id in self.absent.back)
        crew.close()
        self.absent.join(cluster)
        try:
            self._renew(cluster, present)
        except WorkerError:
            raise
        except HetpipeError as error:  # a device may lack free memory, or an operator
            log.warning("%s cannot join: %s", words(members), error)
            self.absent.lose(members)
            self._renew(crew.cluster, present)
            return
        took_s = time.monotonic() - begin_s
        event = Joined(members, training.steps, training.plan, took_s)
        self.joined.append(event)
        log.warning("%s", event)

    def snapshot(self) -> None:
        """Begin a snapshot of a training at rest, once the snapshot before it is complete."""
        training = self._training
        has_moved = training.plan is not self._plan
        self._copies.wait(training.setup.crew.check_copying)
        self._snapshot_again(training.position)
        training.record_snapshot()
        if has_moved:  # a replay from before would give a stream weights of other ages
            self._since = training.steps
            self._copies.wait(training.setup.crew.check_copying)

    def _snapshot_again(self, position: int) -> None:
        """Begin a snapshot at a position of the journal."""
        training = self._training
        moment = Moment(
            position, training.steps, tuple(training.updates), training.plan,
            training.scaling.state(), training.not_finite, training.stages.unread,
        )  # fmt: skip
        crew = training.setup.crew
        self._copied_nbytes = crew.copied_nbytes  # tied values may be on more stages than before
        crew.copy(self._copies, moment)
        self._begun = training.mini_batches_before(position)
        self._plan = training.plan

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is repeated after a loss that the training survives.

        Raises the `WorkerError` of any other loss.
        """
        while True:
            try:
                return work()
            except WorkerError as error:
                self._recover(error)

    def _limit_passes(self) -> None:
        """Let a pass count as stuck by the time of the latest steps, unless the user gave a
        limit."""
        training = self._training
        if training.setup.passes.pass_limit_s is None:
            count = min(RECENT, training.steps - self._since)
            training.setup.crew.pass_limit_s = stuck_after_s(training.results.recent_s(count))

    def _every(self) -> int:
        """Return the number of mini-batches from one snapshot to the next.

        It is the best number by Daly's formula. But a snapshot takes at most `SHARE` of the time,
        and a replay otherwise at most `REPLAY_S`.
        """
        if self._options.snapshot_every is not None:
            return self._options.snapshot_every
        steps_s = self._training.results.recent_s(RECENT)
        step_s = max(median(steps_s), LEAST_S) if steps_s else 1.0
        copy_s = max(self._copies.typical_s, LEAST_S)
        best = min(best_updates(step_s, copy_s, MTBF_S), math.ceil(REPLAY_S / step_s))
        return max(best, math.ceil(copy_s / (SHARE * step_s)))

    @property
    def _latest(self) -> Kept:
        latest = self._copies.latest
        assert latest is not None
        return latest

    def _recover(self, error: WorkerError) -> None:
        """Continue on the remaining devices. Raises an error if that is not possible."""
        training, begin_s = self._training, time.monotonic()
        step, why, names = training.steps, str(error), list[str]()
        tried: Crew | None = None
        while True:
            if training.setup.crew is tried and not isinstance(error, MissingError):
                raise error  # no crew has started
            tried = training.setup.crew
            lost, cluster = self._remove_lost(error)
            names += [name for name in lost if name not in names]
            try:
                self._renew(cluster, training.plan)
                replayed = training.replay(self._snapshot_again)
                self._since = training.steps  # the times of a replay are not kept
                self.on_resumed()
                break
            except WorkerError as again:
                error = again
            except HetpipeError:
                training.setup.crew.close()  # only a part of the mini-batches is trained again
                raise
        took_s = time.monotonic() - begin_s
        event = Lost(tuple(names), why, step, training.plan, took_s, replayed)
        self.lost.append(event)
        log.warning("%s", event)

    def _remove_lost(self, error: WorkerError) -> tuple[list[str], Cluster]:
        """End the crew. Return its lost members, and the cluster of the others.

        Raises an error if no lost member is known, or if no member is left.
        """
        training = self._training
        crew, number = training.setup.crew, training.mini_batches + training.forwards
        present, lost, raised = crew.cluster, crew.lost, crew.raised
        if isinstance(error, MissingError):  # of a later crew, which did not start
            present, lost, raised = error.cluster, error.members, False
        crew.close()
        if not lost:
            raise error
        if raised:
            self._errors.add(error, number)
        try:
            cluster = self.absent.remaining(present, lost, number)
        except ClusterError:
            raise WorkerError(
                f"{error}; no device is left to continue; with checkpoint=, or fit's folder= and "
                "resume='auto', the script continues from its last checkpoint when it starts again"
            ) from error
        silent = [id for id in present.ids if id not in (*lost, *cluster.ids)]
        return lost + silent, cluster

    def _renew(self, cluster: Cluster, present: Plan) -> None:
        """Start workers on a cluster, and load the latest snapshot on them. `present` is the plan
        that the training has had."""
        training, kept = self._training, self._latest
        moment = self._moment(kept)
        self._copies.abandon()
        crew = start_crew(cluster)
        # If a member is lost now, it is one of this crew.
        setup = training.setup = replace(training.setup, crew=crew)
        try:
            self.absent.emulate(crew)
            plan, costs = checked_plan(setup, self._first, present, training.sizes)
            if moment.scale is not None:
                training.scaling.restore(moment.scale)
            training.not_finite = moment.not_finite
            values = Checkpoint({}, values_of(kept, moment.unread, setup.captured.parts))
            before = Progress(moment.steps, moment.updates, moment.plan, None, {}, {})
            self._since = moment.steps
            setup = replace(setup, plan=plan)
            training.renew(setup, values, moment.steps, before.updates_under(plan))
            self._plan = training.plan
        except BaseException:
            crew.close()  # nobody else does before the pipeline has it
            raise
        self._renewed(costs)

    def _moment(self, kept: Kept) -> Moment:
        """Return the moment of a snapshot, and forget what came before it."""
        moment = kept.mark
        assert isinstance(moment, Moment)
        self._training.forget(moment.position)
        return moment
