"""The facts of a pipeline in training: its plan, counts, costs and times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetpipe.html import lines_html
from hetpipe.pipeline.measurements import Measurements, effort_of

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cluster.member import Member
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.crew import Crew
    from hetpipe.explain.explanation import Explanation
    from hetpipe.pipeline.changes import Joined, Lost
    from hetpipe.pipeline.rebalance import Rebalancer
    from hetpipe.pipeline.survival import Survival
    from hetpipe.pipeline.training import Training
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.rounds import Effort
    from hetpipe.simulate.timeline import Timeline


class Facts:
    """The attributes of a pipeline that only tell something."""

    _captured: Captured
    _crew: Crew
    _efforts: list[Effort]
    _measurements: Measurements
    _rebalancer: Rebalancer
    _survival: Survival | None = None
    _training: Training

    def _repr_html_(self) -> str:
        """Show plan, step and last loss; nothing is flushed."""
        history = self._training.results.history
        last = f", last loss {history[-1].loss:.6g}" if history else ""
        return self.plan._repr_html_() + lines_html([f"pipeline: step {self.steps}{last}"])

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self._training.plan

    @property
    def steps(self) -> int:
        """The number of mini-batches, including those before a checkpoint. A schedule that flushes
        does not count a mini-batch whose loss or gradients were not finite."""
        return self._training.steps

    @property
    def lost(self) -> tuple[Lost, ...]:
        """The losses of devices that this pipeline has survived."""
        return () if self._survival is None else tuple(self._survival.lost)

    @property
    def joined(self) -> tuple[Joined, ...]:
        """The members that have come back to this pipeline, and when."""
        return () if self._survival is None else tuple(self._survival.joined)

    @property
    def snapshot_nbytes(self) -> int:
        """The bytes of this process's memory that snapshots take; 0 without `survive`."""
        return 0 if self._survival is None else self._survival.nbytes

    @property
    def loss_scale(self) -> float:
        """The present factor of the loss's gradient."""
        return self._training.scaling.scale

    @property
    def skipped(self) -> int:
        """The number of updates that were skipped because gradients were not finite."""
        return self._training.scaling.skipped

    @property
    def boards(self) -> tuple[Member, ...]:
        """The members that are boards."""
        return self._crew.cluster.described

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the last step or run; with boards in the plan it is modelled."""
        return self._measurements.timeline

    @property
    def wall_timeline(self) -> Timeline:
        """`timeline` by this machine's clock: a board's row has the times of its numerics."""
        return self._measurements.wall_timeline

    @property
    def modelled_step_s(self) -> float | None:
        """Modelled seconds of the last mini-batch, or None without boards in the plan."""
        return self._measurements.modelled_step_s

    @property
    def peak_nbytes(self) -> tuple[int, ...]:
        """By stage, the most bytes of buffers that a device had in the last mini-batches."""
        return self._measurements.peak_nbytes

    @property
    def device_nbytes(self) -> dict[str, int]:
        """By member, the bytes in use after the last mini-batch, if its device counts them."""
        return self._measurements.device_nbytes

    @property
    def costs(self) -> CostTable | None:
        """The plan's costs, scaled by the times of the last mini-batches; None without costs."""
        return self._rebalancer.costs

    @property
    def effort(self) -> dict[str, int]:
        """Counts of exports, traces, compilations and so on that the start took."""
        return effort_of(self._captured, self._efforts)

    def explain(self) -> Explanation:
        """Tell where the time of a step goes, and which change would save time.

        Before the first step everything is predicted. Nothing is measured, flushed or changed.
        """
        from hetpipe.pipeline.explaining import explain_training  # it loads rich

        return explain_training(self._training, self._measurements, self._rebalancer.costs)

    @property
    def predicted(self) -> Timeline:
        """The timeline that the costs predict. Raises `HetpipeError` if the plan has no costs."""
        return self._rebalancer.predicted
