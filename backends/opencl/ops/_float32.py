"""Helpers for lowerings to float32 kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..lower.builder import Builder
from ..lower.expr import Value


def why_not_float32(node: fx.Node) -> str | None:
    """Return why float32 kernels cannot run a node, or None. Class indices may be int64."""
    for arg in node.all_input_nodes:
        val = arg.meta["val"]
        if isinstance(val, torch.Tensor) and val.dtype not in (torch.float32, torch.int64):
            return f"this operator is float32 here, not {val.dtype}"
    first = node.all_input_nodes[0].meta["val"]
    return f"an operand is empty: {tuple(first.shape)}" if first.numel() == 0 else None


def why_not_all_float32(node: fx.Node) -> str | None:
    """Return why kernels for non-empty float32 tensors cannot run a node, or None."""
    for arg in node.all_input_nodes:
        val = arg.meta["val"]
        if val.dtype != torch.float32:
            return f"this operator is float32 here, not {val.dtype}"
        if val.numel() == 0:
            return f"an operand is empty: {tuple(val.shape)}"
    return None


def why_not_float32_product(node: fx.Node) -> str | None:
    """Return why kernels for float32 tensors, which may be empty, cannot run a node, or None."""
    for arg in node.all_input_nodes:
        if (dtype := arg.meta["val"].dtype) != torch.float32:
            return f"this operator is float32 here, not {dtype}"
    return None


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments; the operator's schema guarantees their types."""
    return tuple(node.args)


def optional(builder: Builder, name: str, node: Any, stand_in: Value) -> dict[str, Value | int]:
    """Return kernel arguments `name` and `has_name`; kernels never read an absent tensor."""
    there = node is not None
    return {name: builder.value(node) if there else stand_in, f"has_{name}": int(there)}
