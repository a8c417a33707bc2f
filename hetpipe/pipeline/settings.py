"""Settings that decide the numbers of a training: a checkpoint keeps them, and a resume must have
the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetpipe.errors import CheckpointError
from hetpipe.pipeline.lossscale import LossScale
from hetpipe.pipeline.resume import progress_of

if TYPE_CHECKING:
    from hetpipe.checkpoint.checkpoint import Checkpoint
    from hetpipe.pipeline.stages import Subject


def settings_of(subject: Subject) -> dict[str, Any]:
    """Return the settings that decide the numbers of a training, as JSON values, without the
    learning rate and the plan.

    With batch norms, whose statistics depend on the micro-batches, their number is a setting.
    """
    captured, optimizer, updates = subject.captured, subject.optimizer, subject.updates
    rule = updates.loss_scale
    settings: dict[str, Any] = {
        "seed": subject.passes.seed,
        "precision": captured.precision.compute,
        "cut_dtype": captured.precision.cut,
        "sync_batch_norm": captured.sync_batch_norm,
        "clip_norm": updates.clip_norm,
        "clip_each": updates.clip_each,
        "accumulate": updates.accumulate,
        "loss_scale": asdict(rule) if isinstance(rule, LossScale) else rule,
        **{f"optimizer.{name}": value for name, value in optimizer.hyperparameters},
        "undecayed": [n for n in captured.parameters if optimizer.rule_for(n) is not optimizer],
    }
    if captured.updated_buffers:
        settings["microbatches"] = subject.plan.microbatches
    return dict(json.loads(json.dumps(settings)))


def check_settings(resume: Checkpoint | None, subject: Subject) -> None:
    """Raise `CheckpointError` if a setting differs from the checkpoint's and is not `changed`.

    An early checkpoint has no settings.
    """
    if resume is None:
        return
    saved, present = progress_of(resume).settings, settings_of(subject)
    changed = subject.updates.changed
    if unknown := sorted(set(changed) - present.keys()):
        raise CheckpointError(
            f"changed={list(changed)}: there is no setting {unknown[0]!r} that a checkpoint keeps; "
            f"there are {', '.join(present)}"
        )
    names = [
        name
        for name, value in saved.items()
        if name in present and present[name] != value and name not in changed
    ]
    if names:
        before = ", ".join(f"{name}={saved[name]!r}" for name in names)
        now = ", ".join(f"{name}={present[name]!r}" for name in names)
        raise CheckpointError(
            f"the checkpoint was trained with {before}, and would continue with {now}: give the "
            f"checkpoint's, or say that it has changed, by changed={names} (of `hetpipe train`: "
            f"{' '.join(f'--changed {name}' for name in names)})"
        )
