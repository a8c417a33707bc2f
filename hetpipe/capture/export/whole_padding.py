"""Pads the gradients of a loss over whole mini-batches as the outputs to which they belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from hetpipe.buckets import Buckets
from hetpipe.capture.export.padding import Padding
from hetpipe.errors import HetpipeError

LABELS, OUTPUTS = "labels", "outputs"
"""The user's y, and the gradients by outputs, in the y of a model that is captured for such a
loss."""


def lengths_of(
    outputs: Sequence[Tensor], others: Sequence[Tensor], padding: Padding, other: int
) -> dict[int, int]:
    """Return the dimension with the batch's length, by number of an output that has one.

    `outputs` are of the largest bucket, `others` of the size `other`. Raises `HetpipeError` for an
    output whose shape depends on the length in another way.
    """
    found = {}
    wanted = padding.buckets.largest, padding.length(other)
    for number, pair in enumerate(zip_longest(outputs, others, fillvalue=torch.empty(()))):
        shapes = [tuple(each.shape) for each in pair]
        varying = [
            (dim, sizes) for dim, sizes in enumerate(zip_longest(*shapes)) if len({*sizes}) > 1
        ]
        if not varying:
            continue
        ((dim, sizes), *more) = varying
        if more or sizes != wanted:
            raise HetpipeError(
                f"tensor {number} of the model's output has shape {shapes[0]} for batches of "
                f"length {wanted[0]}, and {shapes[1]} for length {wanted[1]}: with buckets and "
                "loss_over='mini-batch', at most one dimension of an output may vary, and it must "
                "be the length"
            )
        found[number] = dim
    return found


def buckets_of(padding: Padding, lengths: Mapping[int, int]) -> Buckets:
    """Return the buckets for batches with the gradients of outputs, whose padding is zero.

    `lengths` is the result of `lengths_of`. Raises `HetpipeError` for labels whose padding the user
    has not named.
    """
    for name in sorted(padding.assumed):
        raise HetpipeError(
            f"buckets must pad {name}, and with loss_over='mini-batch' it is not known which "
            "labels loss_fn leaves out: give the value, as hp.Buckets(lengths, "
            f"pad={{{name!r}: -100}}), and let loss_fn leave it out"
        )
    gradients = {f"y.{OUTPUTS}.{number}": dim for number, dim in lengths.items()}
    dims = {_inner(name): dim for name, dim in padding.dims.items()}
    pad = {_inner(name): value for name, value in padding.values.items()}
    return Buckets(padding.buckets.lengths, dims | gradients, pad | dict.fromkeys(gradients, 0.0))


def _inner(name: str) -> str:
    """Return the name of a leaf of the user's batch in the batch with gradients."""
    return f"y.{LABELS}{name[1:]}" if name[0] == "y" else name
