"""Operators that create tensors: constants, ranges and random masks."""

from __future__ import annotations

import math

from torch import fx

from hetpipe.sdk.graph import operator_name

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Coord, Layout
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ..lower.signature import Argument
from ._common import FLOATS, arguments, cast

CHUNK = 1024
"""Blocks of four numbers per work-item; on a GPU a work-item has one block."""
NUMBERS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
"""Operators that fill a tensor with a given number: the number's position in their arguments."""


@lowers("aten.full.default", "aten.full_like.default", "aten.new_full.default",
        "aten.scalar_tensor.default", "aten.zeros.default", "aten.zeros_like.default",
        "aten.new_zeros.default", "aten.empty.memory_format", "aten.empty_like.default",
        "aten.new_empty.default", "aten.empty_strided.default", "aten.empty_permuted.default",
        "aten.new_empty_strided.default", "aten.ones.default", "aten.ones_like.default",
        "aten.new_ones.default")  # fmt: skip
def constant(builder: Builder, node: fx.Node) -> None:
    """Result: the same number everywhere; `aten.empty` and its variants give 0."""
    name, dtype = operator_name(node).split(".")[1], node_dtype(node)
    number = arguments(node)[NUMBERS[name]] if name in NUMBERS else int("ones" in name)
    if dtype not in FLOATS:
        number = bool(number) if dtype == "bool" else int(number)
    builder.define(node, builder.pool.make(Const, node_shape(node), dtype, number))


@lowers("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(builder: Builder, node: fx.Node) -> None:
    numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
    start = numbers[0] if len(numbers) > 1 else 0
    step = numbers[2] if len(numbers) > 2 else 1
    shape, dtype = node_shape(node), node_dtype(node)
    if dtype not in FLOATS:
        layout = Layout(shape, (int(step),), int(start))
        builder.define(node, cast(builder, builder.pool.make(Coord, shape, "int64", layout), dtype))
        return
    index = cast(builder, builder.pool.make(Coord, shape, "int64", Layout(shape, (1,))), dtype)
    first, stride = (builder.pool.make(Const, shape, dtype, float(n)) for n in (start, step))
    builder.define(node, builder.apply("{1} + {0} * {2}", dtype, index, first, stride))


@lowers("hetpipe.keep_mask.default", "hetpipe.uniform.default")
def draw(builder: Builder, node: fx.Node) -> None:
    """Draw numbers with the batch dimension first, then move that dimension to its place."""
    rng, site, _, *keep, batch_dim, samples = arguments(node)
    macros = ["MASK"] if keep else []
    shape = node_shape(node)
    batch_dim %= len(shape)
    moved = (shape[batch_dim], *shape[:batch_dim], *shape[batch_dim + 1 :])
    out = builder.new(moved, node_dtype(node))
    elements = math.prod(shape) // max(1, samples)
    on_card = builder.device.family == "gpu"
    lanes, chunk = (1, 1) if on_card else (16, CHUNK)
    kernel = Kernel.of_files("draw", ("random.cl",), *macros, f"LANES={lanes}", f"CHUNK={chunk}")
    blocks = -(-elements // 4)
    group = builder.device.group if on_card else 1
    items = -(-samples * -(-blocks // chunk) // group) * group
    signed = (site & 0xFFFFFFFF) - ((site & 0x80000000) << 1)
    args: dict[str, Argument] = {
        "rng": builder.value(rng), "out": out, "site": signed, "elements": elements,
        "samples": samples, "keep": float(keep[0]) if keep else 0.0,
    }  # fmt: skip
    builder.launch(kernel, (items,), args, (group,))
    order = [*range(1, batch_dim + 1), 0, *range(batch_dim + 1, len(shape))]
    drawn = builder.view(builder.pool.load(out), lambda layout: layout.permute(order))
    builder.define(node, drawn)
