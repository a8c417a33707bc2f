"""The loss of a whole mini-batch, with the option `loss_over="mini-batch"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hetpipe.capture.program import PARAM
from hetpipe.crew.request import WholeLoss
from hetpipe.pipeline.batches import slices

if TYPE_CHECKING:
    from hetpipe.pipeline.setup import Setup
    from hetpipe.wire.messages import Array


def whole_loss_of(
    setup: Setup,
    leaves: Mapping[str, Array],
    samples: Sequence[int],
    number: int,
    in_eval: Mapping[str, Array] | None = None,
) -> Callable[[Mapping[str, Array]], WholeLoss] | None:
    """Return a function of the outputs of mini-batch `number`; None if micro-batches have losses.

    For a loss in eval mode, `in_eval` has the result of `read_values`. Otherwise no step may be
    under way.
    """
    captured = setup.whole_loss
    if captured is None:
        return None
    values = read_values(setup, {}) if in_eval is None else in_eval
    seed = (setup.passes.seed * 1_000_003 + number) % 2**63

    def compute(outputs: Mapping[str, Array]) -> WholeLoss:
        found = captured.value(outputs, leaves, values, in_eval is None, seed)
        return WholeLoss(found.total, found.count, tuple(slices(found.gradients, samples)))

    return compute


def read_values(setup: Setup, unread: Mapping[str, Array]) -> dict[str, Array]:
    """Return the present parameters of the loss of whole mini-batches. In forwards alone no stage
    reads them: they have the values in `unread`, or else the values at capture."""
    captured = setup.whole_loss
    names = [] if captured is None else captured.loss_parameters
    if captured is not None and not captured.trains:
        return {name: unread.get(name, captured.parameters[name]) for name in names}
    return setup.crew.read(PARAM, names) if names else {}
