"""A manifest with a right checksum but impossible values is refused with the value's place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.tensors import Tensors
from hetpipe.errors import CheckpointError
from hetpipe.pipeline.lossscale import LossScale, Scaling
from hetpipe.pipeline.resume import progress_of, restore
from hetpipe.plan.plan import Plan

PLAN = {
    "version": 2, "model": "M", "layers": ["a"], "schedule": "1f1b", "mini_batch": 4,
    "microbatches": 1, "step_s": 1.0, "cut_nbytes": [], "label": "measured", "origin": "user",
    "notes": [], "weights": "flush",
    "stages": [
        {
            "lo": 0, "hi": 1, "devices": ["d"], "in_flight": 1, "forward_s": 0.1,
            "backward_s": 0.1, "update_s": 0.1, "memory_nbytes": 1, "capacity_nbytes": 1,
            "shares": [1.0], "all_reduce_s": 0.0,
        }
    ],
}  # fmt: skip
VALUES = {
    "step": 3, "updates": [3], "plan": PLAN, "optimizer": {"name": "sgd", "state": []},
    "loss_scale": {"scale": 1.0, "good": 0, "skipped": 0},
}  # fmt: skip

RULE = LossScale(start=4.0)
SCALED = {"precision": "float16", "loss_scale": asdict(RULE)}


@dataclass
class Unsaved:
    """A training before its first mini-batch."""

    scaling: Scaling
    steps: int = 0
    not_finite: str | None = None
    updates: list[int] = field(default_factory=list)
    last_save: str = ""
    plan: Plan = field(default_factory=lambda: Plan.from_json(PLAN))

    def tensors(self, role: str) -> Tensors:
        return Tensors.of({})


def test_values_of_a_pipeline_are_read() -> None:
    progress = progress_of(Checkpoint(dict(VALUES), {}))
    assert (progress.steps, progress.updates, progress.plan.model) == (3, (3,), "M")
    early = {key: value for key, value in VALUES.items() if key != "loss_scale"}
    assert progress_of(Checkpoint(early, {})).loss_scale is None


@pytest.mark.parametrize(
    ("recorded", "scale"),
    [
        ({}, 512.0),
        ({"precision": "float16"}, 512.0),
        (SCALED, 512.0),
        ({**SCALED, "precision": None}, 4.0),
        ({**SCALED, "loss_scale": 8.0}, 4.0),
    ],
)
def test_an_adaptive_scale_continues_unless_a_recorded_setting_differs(
    recorded: dict[str, Any], scale: float
) -> None:
    state = {"scale": 512.0, "good": 7, "skipped": 2}
    training = Unsaved(Scaling(RULE, 4.0))
    values = {**VALUES, "loss_scale": state, "settings": recorded}
    restore(training, Checkpoint(values, {}), SCALED, [*SCALED], lambda *_: None)
    assert (training.scaling.scale, training.scaling.skipped) == (scale, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": []}, "updates"),
        ({"updates": ["3"]}, r"updates\.0 is '3'"),
        ({"updates": None}, "updates"),
        ({"step": -1}, "step is -1"),
        ({"loss_scale": {"scale": 0.0, "good": 0, "skipped": 0}}, r"loss_scale\.scale is 0\.0"),
        ({"loss_scale": {"scale": 1.0, "good": 0}}, "skipped"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"plan": {**PLAN, "stages": 3}}, "stages is 3"),
        ({"plan": {**PLAN, "version": 9}}, "version 9"),
    ],
)
def test_impossible_values_are_refused_with_their_place(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        progress_of(Checkpoint({**VALUES, **change}, {}))


def test_a_missing_value_is_named() -> None:
    values = {key: value for key, value in VALUES.items() if key != "updates"}
    with pytest.raises(CheckpointError, match="lacks the key 'updates'"):
        progress_of(Checkpoint(values, {}))
