"""Registry of lowerings: a function for each operator, and reasons to refuse a node.

A module of `ops/` registers its lowerings when it is imported:

    @lowers("aten.mm.default", supports=why_not)
    def matmul(builder: Builder, node: fx.Node) -> None: ...

An operator may have a form for graphics cards, `on_cards`, beside its form for other devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from hetpipe.sdk.graph import dtype_name, operator_name
from hetpipe.sdk.info import DeviceInfo

from .builder import Builder

Lower = Callable[[Builder, fx.Node], None]
Supports = Callable[[fx.Node], str | None]


@dataclass(frozen=True)
class Lowering:
    """The lowering of an operator; `supports` returns why a node cannot be lowered, or None."""

    lower: Lower
    supports: Supports | None = None
    kept: bool = False
    """Whether the operator has a dedicated kernel and is not decomposed."""
    on_cards: Lower | None = None
    """The lowering of the family gpu; None if all families share `lower`."""

    def of_family(self, family: str) -> Lower:
        """Return the lowering for a device with kernels of `family`."""
        return self.on_cards if family == "gpu" and self.on_cards is not None else self.lower


LOWERINGS: dict[str, Lowering] = {}
"""hetpipe's lowerings, to which a backend adds kernels; see `OpenCLBackend.lowerings`."""


def lowers(
    *operators: str, supports: Supports | None = None, kept: bool = False
) -> Callable[[Lower], Lower]:
    """Register a lowering for operators such as `aten.mm.default`, or `getitem`.

    See `Lowering` for the options. Raises `ValueError` if an operator already has a lowering.
    """

    def register(lower: Lower) -> Lower:
        for name in operators:
            if name in LOWERINGS:
                first = LOWERINGS[name].lower
                raise ValueError(f"{name} is lowered by {first.__module__} already")
            LOWERINGS[name] = Lowering(lower, supports, kept)
        return lower

    return register


def lowers_on_cards(*operators: str) -> Callable[[Lower], Lower]:
    """Register the form for graphics cards of operators that have a lowering.

    Raises `KeyError` if an operator has none, and `ValueError` if it already has such a form.
    """

    def register(lower: Lower) -> Lower:
        for name in operators:
            stock = LOWERINGS[name]
            if stock.on_cards is not None:
                first = stock.on_cards.__module__
                raise ValueError(f"{name} has a form for graphics cards already, from {first}")
            LOWERINGS[name] = replace(stock, on_cards=lower)
        return lower

    return register


def kept_operators(lowerings: Mapping[str, Lowering] = LOWERINGS) -> frozenset[str]:
    """Return the operators of a table that are not decomposed."""
    return frozenset(name for name, lowering in lowerings.items() if lowering.kept)


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
    """Return whether the node is a cast at an end of the graph.

    The cast reads an input of the graph (then `arg` is this input), or only outputs read the cast
    (then `arg` is the cast). In between, a kernel would compute with more precision than the dtype
    has.
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
