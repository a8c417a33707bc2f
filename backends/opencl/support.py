"""Why an OpenCL device cannot run a node."""

from __future__ import annotations

import operator

import torch
from torch import fx

from hetpipe.sdk.graph import dtype_name, operator_name

from .target import Target


def refusal(target: Target, node: fx.Node) -> str | None:
    """The reason, or None if the device can."""
    name, info = operator_name(node), target.info
    lowering = target.lowerings.get(name)
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
    """Whether the node casts an input of the graph, or (arg is the node itself) to an output.

    Between two nodes, a kernel would hold the value in more digits than are stored.
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
