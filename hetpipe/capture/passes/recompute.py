"""Modes of recomputation: which part of a stage's forward its backward computes again."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.errors import CaptureError

NONE, INPUTS, MIN_CUT = "none", "inputs", "min-cut"
MODES = (NONE, INPUTS, MIN_CUT)
"""`none`: the forward keeps every tensor that autograd reads, and the backward repeats nothing.

`inputs`: the forward keeps the stage's inputs, and the backward runs the whole forward again (Chen
et al., "Training deep nets with sublinear memory cost", 2016; GPipe keeps stage inputs too).

`min-cut`: the forward keeps as few bytes as possible, including stage inputs, such that the
backward repeats no product, convolution, attention or recurrent layer. Among equal choices it
repeats the least.

In all modes the backward draws the same masks again, sums over replicas are kept, running
statistics change in the forward only, and a repeated forward uses the backward's parameters.
"""


def check_modes(recompute: Sequence[str], stages: int) -> tuple[str, ...]:
    """Return one mode per stage; all `none` if `recompute` is empty. Raises `CaptureError`."""
    modes = tuple(recompute) or (NONE,) * stages
    if len(modes) != stages:
        raise CaptureError(
            f"{len(modes)} recompute modes for {stages} stages; give one per stage, or none at all"
        )
    for mode in modes:
        if mode not in MODES:
            raise CaptureError(f"recompute mode {mode!r} is not known; use one of {MODES}")
    return modes
