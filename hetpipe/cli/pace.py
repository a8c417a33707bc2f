"""The step time that `hetpipe train` prints: measured, or modelled for boards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.pipeline.pipeline import Pipeline
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.drift import Correction


@dataclass(frozen=True)
class Pace:
    """Seconds of a step by this machine's clock, and modelled seconds if the plan has boards.

    With boards, the clock times the devices that compute the boards' numbers, so the two times
    cannot be compared.
    """

    plan: Plan
    wall_s: float
    wall_label: str
    modelled_s: float | None
    correction: Correction | None
    boards: dict[str, tuple[str, str]]  # by member: board and numerics

    @property
    def step_s(self) -> float:
        """Seconds of a step: modelled if the plan has boards, else by this machine's clock."""
        return self.wall_s if self.modelled_s is None else self.modelled_s

    def lines(self) -> list[str]:
        """Return lines of text with the rate and the step times."""
        rate = f"{self.plan.mini_batch / self.step_s:.1f} samples/s ({self.plan.label}; "
        if self.modelled_s is None:
            median = f"median step {self.wall_s * 1e3:.1f} ms"
            return [f"{rate}{median}, {self.correction or 'not predicted'})"]
        names = ", ".join(f"{id} is {board}" for id, (board, _) in self.boards.items())
        numerics = ", ".join(dict.fromkeys(device for _, device in self.boards.values()))
        return [
            f"{rate}a step takes {self.modelled_s * 1e3:.3f} ms, predicted "
            f"{self.plan.step_s * 1e3:.3f} ms; {names})",
            f"{self.wall_label}: median step {self.wall_s * 1e3:.1f} ms by this machine's clock, "
            f"with {numerics}; this time says nothing about a board",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return fields for the command's JSON."""
        correction = None if self.boards else self.correction
        predicted_s = self.plan.step_s if self.boards else correction and correction.raw_s
        return {
            "step_s": self.step_s,
            "predicted_step_s": predicted_s,
            "corrected_step_s": correction and correction.corrected_s,
            "samples_per_s": self.plan.mini_batch / self.step_s,
            "label": self.plan.label,
            "wall_step_s": self.wall_s,
            "wall_label": self.wall_label,
            "boards": {id: board for id, (board, _) in self.boards.items()},
            "numerics": {id: device for id, (_, device) in self.boards.items()},
        }


def pace_of(pipe: Pipeline, wall_s: float) -> Pace:
    """Return the pace of a pipeline with median step `wall_s`; probe its devices for drift."""
    used = set(pipe.plan.all_devices)
    boards = {m.id: (m.board, m.numerics) for m in pipe.boards if m.id in used}
    correction = None if boards or pipe.costs is None else pipe.corrected()
    label = pipe.wall_timeline.label
    return Pace(pipe.plan, wall_s, label, pipe.modelled_step_s, correction, boards)
