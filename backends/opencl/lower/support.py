"""Reasons why an OpenCL device cannot run a node."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from hetpipe.sdk.graph import dtype_name, operator_name
from hetpipe.sdk.info import DeviceInfo

from .registry import Lowering


def refusal(info: DeviceInfo, lowerings: Mapping[str, Lowering], node: fx.Node) -> str | None:
    """Return why the device cannot run the node, or None if it can."""
    name = operator_name(node)
    lowering = lowerings.get(name)
    if lowering is None:
        return f"{name} has no OpenCL lowering"
    for arg in (node, *node.all_input_nodes):
        if node.target is operator.getitem and arg is not node:
            continue
        for tensor in _tensors(arg.meta.get("val")):
            dtype = dtype_name(tensor.dtype)
            if dtype not in info.dtypes and not (dtype in info.cast_dtypes and _enters(node, arg)):
                return f"dtype {dtype} of {arg.name}; the device has {', '.join(info.dtypes)}"
            if tensor.numel() >= 2**31:
                return f"{arg.name} has {tensor.numel()} elements; kernels count to {2**31 - 1}"
    return None if lowering.supports is None else lowering.supports(node)


def _enters(node: fx.Node, arg: fx.Node) -> bool:
    """Return whether the node casts from an input of the graph, or (if `arg` is the node) to an
    output.

    Elsewhere a kernel would keep the value at a higher precision than its dtype.
    """
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    if arg is node:
        return all(user.op == "output" for user in node.users)
    return arg.op == "placeholder"


def _tensors(val: object) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, (tuple, list)):
        return [item for item in val if isinstance(item, torch.Tensor)]
    return []
