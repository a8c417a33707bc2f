"""Counts and times that a pipeline has measured so far, and its modelled time if it has boards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe.cluster.member import Member
    from hetpipe.crew.crew import Crew
    from hetpipe.pipeline.boardtime import BoardTime
    from hetpipe.pipeline.training import Ran, Training
    from hetpipe.plan.plan import Plan
    from hetpipe.simulate.timeline import Timeline


class Measurements:
    """The properties of a pipeline that its training measures."""

    _training: Training
    _crew: Crew
    _board_time: BoardTime | None
    """None without boards in the plan."""

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self._training.plan

    @property
    def steps(self) -> int:
        """The number of mini-batches handed in, including those before a checkpoint."""
        return self._training.steps

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
        """Timeline of the last step, or of the last mini-batches of a run: measured.

        A plan with boards has a modelled timeline, with that label: the schedule that ran, in the
        time of the boards. Raises `HetpipeError` before the first step.
        """
        if self._board_time is None:
            return replace(self._measured("timeline"), label=self._training.plan.label)
        ran, walls = self._ran("timeline")
        return self._board_time.timeline(ran, walls)

    @property
    def wall_timeline(self) -> Timeline:
        """The timeline by this machine's clock. With boards it shows how long their numerics took,
        as its label and rows say: no time of a board.

        Raises `HetpipeError` before the first step.
        """
        wall = self._measured("wall_timeline")
        if self._board_time is None:
            return replace(wall, label=self._training.plan.label)
        names = {m.id: f"{m.id}: {m.numerics}" for m in self._crew.cluster.described}
        parts = (name.partition(" lane ") for name in wall.workers)
        workers = tuple(names.get(id, id) + lane + number for id, lane, number in parts)
        return replace(wall, workers=workers, label=f"{self._crew.label} on numerics")

    @property
    def modelled_step_s(self) -> float | None:
        """Modelled seconds of the last mini-batch, in a full pipeline for a stream. None without
        boards in the plan.

        Raises `HetpipeError` before the first step.
        """
        if self._board_time is None:
            return None
        return self._board_time.step_s(*self._ran("modelled_step_s"))

    @property
    def peak_nbytes(self) -> tuple[int, ...]:
        """By stage, the most bytes of buffers on a device, counted in the last mini-batches.

        Raises `HetpipeError` before the first step.
        """
        recent = self._training.taken("peak_nbytes")
        return tuple(map(max, zip(*(result.peak_nbytes for result in recent), strict=True)))

    @property
    def device_nbytes(self) -> dict[str, int]:
        """By member, the bytes in use after the last mini-batch, where its device counts them."""
        return dict(self._training.taken("device_nbytes")[-1].device_nbytes)

    def _measured(self, asked: str) -> Timeline:
        recent = self._training.taken(asked)
        spans = tuple(span for result in recent for span in result.timeline.spans)
        return replace(recent[0].timeline, spans=spans)

    def _ran(self, asked: str) -> tuple[Ran, list[Timeline]]:
        """Return the last run and its measured timelines."""
        walls = [result.timeline for result in self._training.taken(asked)]
        assert self._training.ran is not None
        return self._training.ran, walls
