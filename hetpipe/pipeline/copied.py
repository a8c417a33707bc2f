"""Copies of a training's values, by role and with the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetpipe.checkpoint.tensors import Tensors
from hetpipe.crew.copies import Copies, Kept
from hetpipe.pipeline.present import joined
from hetpipe.pipeline.resume import ROLES

if TYPE_CHECKING:
    from hetpipe.capture.passes.split_layers import SplitParameters
    from hetpipe.pipeline.training import Training
    from hetpipe.wire.messages import Array


def values_of(
    kept: Kept, unread: Mapping[str, Mapping[str, Array]], parts: SplitParameters
) -> dict[str, Tensors]:
    """Return the values of a copy; `unread` has the values that no worker has, by role."""
    named: dict[str, dict[str, Array]] = {role: {} for role in ROLES}
    for (role, name), value in kept.values.items():
        named[role][name] = value
    return {
        role: joined(Tensors.of({**unread.get(role, {}), **own}), parts)
        for role, own in named.items()
    }


def copy_values(training: Training, copies: Copies) -> dict[str, Tensors]:
    """Return a copy of the values of a training at rest."""
    crew = training.setup.crew
    training.stages.check_own()
    crew.copy(copies, None)
    copies.wait(crew.check_copying)
    assert copies.latest is not None
    return values_of(copies.latest, training.stages.unread, training.setup.captured.parts)
