"""Copies of a training: their values by role and with the model's names, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetpipe.checkpoint.tensors import Tensors
from hetpipe.crew.copies import Copies, Kept
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.present import joined
from hetpipe.pipeline.resume import ROLES
from hetpipe.words import format_nbytes

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


def check_budget(nbytes: int, batch_nbytes: int, budget_nbytes: int, is_given: bool) -> None:
    """Raise `HetpipeError` if a budget is too small for snapshots and two mini-batches."""
    needed = nbytes + 2 * batch_nbytes
    if needed > budget_nbytes:
        source = "snapshot_nbytes is" if is_given else "half of the free memory is"
        raise HetpipeError(
            f"survive='auto' keeps two snapshots ({format_nbytes(nbytes)}) and at least two mini-"
            f"batches (of {format_nbytes(batch_nbytes)}) in this process's memory: {source} "
            f"{budget_nbytes} bytes, and {needed - budget_nbytes} bytes are missing; give "
            f"snapshot_nbytes={needed} if there is room, or leave survive out"
        )
