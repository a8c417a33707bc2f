"""Decides which operators need row-major operands: many of torch's kernels ignore strides.

Eager autograd makes a gradient contiguous before it calls such a kernel. A captured graph has no
strides, so its copies are dropped, and the backend makes the operands contiguous itself.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from .memory import returns_view

STRIDED = frozenset((
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy",
    "addmm", "argmax", "argmin", "baddbmm", "bmm", "cat", "constant_pad_nd", "contiguous",
    "convolution", "convolution_backward", "copy", "embedding", "embedding_dense_backward", "flip",
    "full_like", "gather", "index", "index_select", "mm", "mv", "ones_like", "repeat",
    "select_backward", "slice_backward", "sort", "stack", "topk", "zeros_like",
))  # fmt: skip
"""Operators that read strided operands correctly, so that a copy would only cost time.

Pointwise operators, reductions and views read strides, too: torch marks them.
"""


DENSE_VIEWS = frozenset((torch.ops.aten.view_as_complex.default, torch.ops.aten.view.dtype))
"""Views that torch makes only of tensors whose last dimension has no gaps."""


def needs_row_major(node: fx.Node) -> bool:
    """Return whether a call needs row-major operands; every Python function does."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    if target in DENSE_VIEWS:
        return True
    return not (target._schema.is_mutable or returns_view(node) or reads_strides(target))


def reads_strides(target: OpOverload) -> bool:
    """Return whether an operator reads strided operands correctly."""
    if target.namespace == "hetpipe":
        return True
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    name = str(target._schema.name).removeprefix("aten::")
    return not tags.isdisjoint(target.tags) or name in STRIDED
