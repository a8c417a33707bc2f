"""Rebalance: plans again when the devices' speeds have changed, and moves layers if a move pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError, PlanError, WorkerError
from hetpipe.pipeline.earlier import GAIN
from hetpipe.pipeline.fit import why_fixed
from hetpipe.pipeline.learning import WINDOW, Hysteresis, Learning
from hetpipe.pipeline.move import HORIZON, Move, layer_moves
from hetpipe.plan.building import build_plan
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.limits import why_impossible
from hetpipe.plan.planner import make_plan, predict
from hetpipe.plan.proposal import Proposal, proposal_of
from hetpipe.plan.search import FREE_ORDER_DEVICES

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.request import StepResult
    from hetpipe.pipeline.training import Training
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.drift import Correction
    from hetpipe.simulate.timeline import Timeline

CHANGE = 0.1
"""If the devices' relative speeds change by more than this, plans are compared without delay."""
PLANNING_SHARE = 0.005
"""If speeds change less than that, comparing plans takes at most this share of the time."""
REORDERING_GAIN = 0.08
"""Another order of the devices must save this share of the best step in the present order."""

log = logging.getLogger("hetpipe")


@dataclass(frozen=True)
class Rebalanced:
    """The result of `Pipeline.rebalance`. Steps are predicted with the learned costs."""

    moved: bool
    why: str
    before_s: float
    """Predicted seconds of a step under the plan before the call."""
    after_s: float
    """Predicted seconds of a step under the best plan."""
    move_s: float
    """Seconds of the move; if no layer moved, the seconds of the last move or load."""


class Rebalancer:
    """Learns costs from a training, and moves its layers.

    With `auto`, plans may be compared after each window of mini-batches; then `due` says whether
    layers should move before the next mini-batch. After a loss they are compared without `auto` as
    well, until the plan has settled: its costs were measured beside the lost devices. `fixed` is
    the reason why no layer may move, or an empty text.
    """

    def __init__(self, training: Training, costs: CostTable | None, fixed: str, auto: bool) -> None:
        self._training = training
        self._planned_by = costs
        known = (
            None if training.setup.crew.cluster.described else costs
        )  # the time of a board cannot be measured
        self._learning = None if known is None else Learning(known, training.plan)
        self._asked_fixed = fixed
        self._fixed = fixed or why_fixed(training.plan)
        self._auto = auto
        self._settled = True  # or the present plan followed a loss, and may still be corrected
        self._hysteresis = Hysteresis()
        self._seen = 0  # mini-batches in the present window
        self._awaited: tuple[int, float, float] | None = None
        """For the last move: number of steps before it, seconds of a step, promised share."""
        self._considered: Mapping[str, float] = {}  # factors for which the present plan was best
        self._may_plan_s = 0.0  # from this time on plans may be compared without a change
        self._next: Move | None = None
        self._ran = {proposal_of(training.plan): None}  # the proposals that have run, in order
        training.watch = self._learn

    def renew(self, costs: CostTable) -> None:
        """Begin again with another plan and its costs, after a loss. Learned factors stay.

        The plan counts as settled if spares have taken the places of lost members, whose results
        equal theirs to the last bit; and under an asynchronous schedule, because a move changes the
        ages of the weights.
        """
        plan = self._training.plan
        same_cuts = self._learning is not None and self._learning.plan.cuts == plan.cuts
        self._settled = same_cuts or not plan.rule.flushes
        self._fixed, self._planned_by = self._asked_fixed or why_fixed(plan), costs
        if self._learning is not None:
            self._learning.restart(plan, costs)
        self._seen, self._next, self._awaited = 0, None, None
        self._hysteresis, self._considered, self._may_plan_s = Hysteresis(), {}, 0.0
        self._ran = {proposal_of(plan): None}

    @property
    def costs(self) -> CostTable | None:
        """The learned costs, or the plan's costs if nothing was learned."""
        if self._learning is None:
            return self._planned_by
        members = self._training.setup.crew.cluster.members
        emulated = [member.id for member in members if member.speed != 1.0]
        return self._learning.table(emulated)

    @property
    def predicted(self) -> Timeline:
        """The present plan's timeline, predicted with the costs that made the plan."""
        return predict(self._training.plan, self.planned_by)

    @property
    def planned_by(self) -> CostTable:
        """The costs that made the present plan. Raises `HetpipeError` if there are none."""
        if self._planned_by is None:
            raise HetpipeError(
                "this plan's step is unknown, because you made every choice yourself "
                "and hetpipe measured nothing; measure costs with "
                "priced=True, or give the plan's costs"
            )
        return self._planned_by

    def corrected(self) -> Correction:
        """Return the plan's prediction, corrected by its last passes or else by probes."""
        from hetpipe.profile.drift import corrected_now  # it loads torch

        by_passes = None if self._learning is None else self._learning.corrected()
        crew = self._training.setup.crew
        return by_passes or corrected_now(crew, self._training.plan, self.planned_by)

    @property
    def due(self) -> bool:
        """Whether layers should move before the next mini-batch."""
        return self._next is not None and not self._training.accumulated

    def rebalance(self, steps: int) -> Rebalanced:
        """Move layers of a training at rest, if that pays; see `Pipeline.rebalance`."""
        if self._fixed:
            raise HetpipeError(f"rebalance: {self._fixed}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise HetpipeError(f"rebalance: steps={steps!r}: give a whole number of 1 or more")
        if count := self._training.accumulated:
            raise HetpipeError(
                f"rebalance: {count} mini-batches are accumulated since the last update, and their "
                "gradients cannot move: call flush() first, or wait for the update"
            )
        try:
            move = self._propose()
        except PlanError as error:
            step_s, took_s = self._training.plan.step_s, self._training.stages.took_s
            return Rebalanced(False, f"no plan fits: {error}", step_s, step_s, took_s)
        times_s = move.present.step_s, move.best.step_s
        if not move.pays(steps):
            limit = f"{100 * GAIN:.0f} % of a step"
            if move.promised > GAIN:
                limit = f"the {move.move_s:.1f} s of a move in {steps} steps"
            why = f"{move.saving}, and layers move only to save more than {limit}"
            return Rebalanced(False, f"{why} ({self._speeds()})", *times_s, move.move_s)
        why = self._speeds()
        self._move(move, why)
        return Rebalanced(True, why, *times_s, self._training.stages.took_s)

    def follow(self) -> None:
        """Make the move that is `due`. The training must be at rest (see `Training`)."""
        move, self._next = self._next, None
        assert move is not None
        try:
            self._move(move, self._speeds())
        except WorkerError:
            raise
        except HetpipeError as error:  # nothing has moved yet
            log.info("step %d: no layer was moved: %s", self._training.steps, error)
            self._hysteresis.pause_after(kept=False)

    def _move(self, move: Move, why: str) -> None:
        assert self._learning is not None
        training, before_s, table = self._training, self._learning.step_s, self.costs
        text = layer_moves(training.plan, move.best)
        training.move(move.best)
        self._learning.restart(move.best)
        self._ran[proposal_of(move.best)] = None
        self._planned_by = table
        self._considered = self._learning.factors
        self._seen, self._next = 0, None
        if before_s is not None:
            self._awaited = training.steps, before_s, move.promised
        log.info(
            "step %d: %s, since %s; %s; the move took %.2f s",
            training.steps, text, why, move.saving, training.stages.took_s,
        )  # fmt: skip

    def _learn(self, result: StepResult, samples: int) -> None:
        """Learn from a mini-batch that was trained."""
        if self._learning is None or samples != self._training.plan.mini_batch:
            return
        self._learning.add(result.timeline)
        self._seen += 1
        if self._seen < WINDOW:
            return
        self._seen = 0
        if self._awaited is not None:
            self._judge(*self._awaited)
        elif self._compares and not self._hysteresis.waits() and self._has_changed():
            self._consider()

    @property
    def _compares(self) -> bool:
        """Whether plans are compared after this window."""
        asked = self._auto or not self._settled
        return asked and not self._fixed and len(self._training.plan.stages) > 1

    def _has_changed(self) -> bool:
        """Whether speeds have changed much, or enough time has passed, to compare plans again; or
        the present plan has not settled."""
        assert self._learning is not None
        changes = [
            factor / self._considered.get(device, 1.0)
            for device, factor in self._learning.factors.items()
        ]
        if not changes:
            return False
        changed = max(changes) / min(changes) > 1 + CHANGE
        return changed or not self._settled or time.monotonic() > self._may_plan_s

    def _consider(self) -> None:
        """Compare plans at the end of a window."""
        assert self._learning is not None
        begin_s = time.monotonic()
        try:
            move = self._propose()
            promises = move.pays(HORIZON)
        except PlanError:  # no plan fits the memory
            promises = False
        end_s = time.monotonic()
        self._may_plan_s = end_s + (end_s - begin_s) / PLANNING_SHARE
        if not promises:
            self._considered, self._settled = self._learning.factors, True
        self._next = move if self._hysteresis.moves(promises) else None

    def _judge(self, step: int, before_s: float, promised: float) -> None:
        """Compare the last move's effect with its promise, log both, and begin the pause."""
        assert self._learning is not None
        self._awaited, self._settled = None, True
        now_s = self._learning.step_s
        gave = 0.0 if now_s is None else 1 - now_s / before_s
        self._hysteresis.pause_after(kept=gave > promised / 2)
        log.info(
            "step %d: the move at step %d promised to save %.0f %% of a step, and saves %.0f %%",
            self._training.steps, step, 100 * promised, 100 * gave,
        )  # fmt: skip

    def _propose(self) -> Move:
        """Return the present plan and the best one, priced by the learned costs.

        The best plan is one that has run in this training, unless a new plan saves `GAIN` more:
        the time of a layer on a device that never had this layer is only extrapolated from the
        device's other layers. Raises `HetpipeError` if nothing was measured, and `PlanError` if no
        plan fits.
        """
        plan, table = self._training.plan, self.costs
        if table is None or not set(plan.devices) <= table.devices.keys():
            raise HetpipeError(
                "rebalance: no layer was measured for this plan, so no costs can be learned: give "
                "the plan's costs as well, use priced=True, or leave out options of the plan"
            )
        costs = StageCosts(table)

        def priced(proposal: Proposal) -> Plan:
            made = build_plan(proposal, {table.samples: costs}, plan.mini_batch, plan.weights)
            return replace(made, origin=plan.origin)

        present, best = priced(proposal_of(plan)), _best(table, plan)
        ran = [priced(each) for each in self._ran
               if why_impossible(each, costs, plan.weights) is None]  # fmt: skip
        tried = min(ran, key=lambda plan: plan.step_s, default=best)
        if best.step_s > (1 - GAIN) * tried.step_s:
            best = tried
        return Move(present, best, self._training.stages.took_s)

    def _speeds(self) -> str:
        """Return the learned factors as a text."""
        factors = {} if self._learning is None else self._learning.factors
        each = [f"{device} takes {factor:.2f}" for device, factor in factors.items()]
        if not each:
            size = f"{self._training.plan.mini_batch} samples"
            padding = self._training.setup.captured.example.padding
            length = "" if padding is None else f" and length {padding.buckets.largest}"
            return f"too few mini-batches of {size}{length} were measured yet"
        return f"{', '.join(each)} times its profiled time"


def _best(table: CostTable, plan: Plan) -> Plan:
    """Return the fastest plan that uses all members of `plan`, so that each is still measured.

    Another order of members moves layers to devices that never had these layers, so it must save
    `REORDERING_GAIN`.
    """
    make = partial(
        make_plan, table, plan.devices, mini_batch=plan.mini_batch,
        microbatches=plan.microbatches, schedule=plan.schedule, weights=plan.weights,
    )  # fmt: skip
    best = make(fixed_order=True)
    if len(plan.devices) > FREE_ORDER_DEVICES:
        return best
    other = make()
    return other if other.step_s < (1 - REORDERING_GAIN) * best.step_s else best
