"""How much of a stage's forward its backward computes again, instead of keeping it."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.errors import CaptureError

NONE, INPUTS, MIN_CUT = "none", "inputs", "min-cut"
MODES = (NONE, INPUTS, MIN_CUT)
"""`none`: the forward keeps what autograd reads, and the backward repeats nothing.

`inputs`: it keeps what enters the stage, and the backward runs the whole forward again (Chen et
al., "Training deep nets with sublinear memory cost", 2016; GPipe keeps stage inputs too).

`min-cut`: it keeps the tensors of the fewest bytes, stage inputs counted too, from which the rest
can be computed again without repeating a product, convolution, attention or recurrent layer; ties
go to the tensors that leave least to repeat.

In all modes masks are drawn again alike, sums over replicas are kept, running statistics change in
the forward only, and what the backward repeats uses the parameters that it is given.
"""


def check_modes(recompute: Sequence[str], stages: int) -> tuple[str, ...]:
    """One mode per stage; all `none` if empty. Raises `CaptureError`."""
    modes = tuple(recompute) or (NONE,) * stages
    if len(modes) != stages:
        raise CaptureError(
            f"{len(modes)} recompute modes for {stages} stages; give one per stage, or none at all"
        )
    for mode in modes:
        if mode not in MODES:
            raise CaptureError(f"recompute mode {mode!r} is not known; use one of {MODES}")
    return modes
