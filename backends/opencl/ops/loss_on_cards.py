"""Softmax, log-softmax and the negative log likelihood on graphics cards.

Rows have kernels, which read a row from memory only once. Everything else is made of generated
reductions and elementwise expressions. So the gradient of a likelihood, which is 0 except for one
class of each sample, is never in memory: the kernels that read it compute it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from hetpipe.sdk.graph import operator_name

from ..gpu.groups import launch_rows
from ..lower.builder import Builder, node_shape
from ..lower.expr import DEAR, Const, Coord, Expr, Layout, Load, Value
from ..lower.reduce import reduce_together
from ..lower.reductions import MAXIMUM, SUM
from ..lower.registry import lowers_on_cards
from ..lower.signature import Argument
from ._common import arguments, choose, formula, reshaped
from .loss import MEAN, NONE, split_at
from .reduction import reduced

CLASSES = 1
"""Dimension of the classes in (outer, classes, inner)."""


@lowers_on_cards("aten._softmax.default", "aten._log_softmax.default")
def softmax(builder: Builder, node: fx.Node) -> None:
    """Result: the softmax over one dimension, or its logarithm."""
    x_node, dim, _ = arguments(node)
    logarithm = "log" in operator_name(node)
    sizes = split_at(node_shape(node), dim)
    outer, classes, inner = sizes
    x = builder.value(x_node)
    if inner == 1:
        y = builder.new(x.shape, "float32")
        args: dict[str, Argument] = {"x": x, "y": y, "rows": outer, "classes": classes}
        args["logarithm"] = int(logarithm)
        launch_rows(builder, "softmax.cl", "softmax_rows", classes, args)
        builder.result(node, y)
        return
    scores = reshaped(builder, builder.pool.load(x), sizes)
    off = formula(builder, "{0} - {1}", scores, reduced(builder, scores, [CLASSES], MAXIMUM))
    power = formula(builder, "exact_exp({0})", off, weight=DEAR)
    total = reduced(builder, power, [CLASSES], SUM)
    if logarithm:
        level = formula(builder, "log({0})", total, weight=DEAR)
        result = formula(builder, "{0} - {1}", off, level)
    else:
        result = formula(builder, "{0} / {1}", power, total)
    builder.define(node, reshaped(builder, result, x.shape))


@lowers_on_cards("aten._softmax_backward_data.default")
def softmax_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx = y (dy - sum(dy y))."""
    dy_node, y_node, dim, _ = arguments(node)
    sizes = split_at(node_shape(node), dim)
    outer, classes, inner = sizes
    dy, y = builder.value(dy_node), builder.value(y_node)
    if inner == 1:
        dx = builder.new(y.shape, "float32")
        args: dict[str, Argument] = {"dy": dy, "y": y, "dx": dx, "rows": outer, "classes": classes}
        launch_rows(builder, "softmax.cl", "softmax_backward_rows", classes, args, (dy, y))
        builder.result(node, dx)
        return
    g, v = (reshaped(builder, builder.pool.load(each), sizes) for each in (dy, y))
    total = reduced(builder, formula(builder, "{0} * {1}", g, v), [CLASSES], SUM)
    result = formula(builder, "{0} * ({1} - {2})", v, g, total, weight=2)
    builder.define(node, reshaped(builder, result, y.shape))


@lowers_on_cards("aten._log_softmax_backward_data.default")
def log_softmax_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx = dy - exp(y) sum(dy)."""
    dy_node, y_node, dim, _ = arguments(node)
    shape = node_shape(node)
    g, v = (reshaped(builder, builder.expr(n), split_at(shape, dim)) for n in (dy_node, y_node))
    total = reduced(builder, g, [CLASSES], SUM)
    result = formula(builder, "{0} - exact_exp({1}) * {2}", g, v, total, weight=DEAR)
    builder.define(node, reshaped(builder, result, shape))


def _truth(builder: Builder, code: str, place: Expr, *numbers: int) -> Expr:
    """Return a bool for each class number in `place`; `{1}` in `code` is the first number."""
    constants = (builder.pool.make(Const, place.shape, "int64", n) for n in numbers)
    return builder.apply(f"abs(convert_{{M}}({code}))", "bool", place, *constants)


@lowers_on_cards("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(builder: Builder, node: fx.Node) -> None:
    """Results: (loss, total weight). A class that does not exist gives NaN."""
    x_node, target, weight, reduction, ignore = arguments(node)
    x = builder.value(x_node)
    outer, classes, inner = split_at(x.shape, len(x.shape[:2]) - 1)  # [C] or [N][C][...]
    samples = (outer, inner)
    place = reshaped(builder, builder.expr(target), samples)

    def chosen(value: Value, stride: int, layout: Layout) -> Expr:
        """Return the elements of the samples' classes."""
        return builder.pool.make(
            Load, samples, "float32", value, layout, ((place, stride, classes),)
        )

    score = chosen(x, inner, Layout(samples, (classes * inner, 1)))
    zero, one, wrong = (builder.expr(number, samples) for number in (0.0, 1.0, float("nan")))
    share = one
    if weight is not None:
        share = chosen(builder.value(weight), 1, Layout(samples, (0, 0)))
    exists = _truth(builder, "({0} >= 0) & ({0} < {1})", place, classes)
    ignored = _truth(builder, "{0} == {1}", place, ignore)
    share = choose(builder, exists, share, wrong)
    term = choose(builder, ignored, zero, formula(builder, "-{0} * {1}", share, score))
    share = choose(builder, ignored, zero, share)
    loss_shape, total_shape = (tuple(map(int, val.shape)) for val in node.meta["val"])
    # For one sample without a dimension, torch also returns the sample's weight.
    if reduction == NONE and len(x.shape) > 1:
        loss, total = reshaped(builder, term, loss_shape), builder.expr(0.0, total_shape)
    else:
        sums = reduce_together(builder, [term, share], [0, 1], SUM)
        loss, total = map(builder.pool.load, sums)
        loss = formula(builder, "{0} / {1}", loss, total) if reduction == MEAN else loss
    builder.define_results(node, (loss, total))


@lowers_on_cards("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(builder: Builder, node: fx.Node) -> None:
    """Result: the gradient of the scores."""
    dloss, _, target, weight, reduction, ignore, total = arguments(node)
    shape = node_shape(node)
    sizes = outer, classes, inner = split_at(shape, len(shape[:2]) - 1)
    per_sample = (outer, 1, inner) if reduction == NONE else (1, 1, 1)
    slope = formula(builder, "-{0}", reshaped(builder, builder.expr(dloss), per_sample))
    if reduction == MEAN:
        whole: Any = reshaped(builder, builder.expr(total), (1, 1, 1))
        slope = formula(builder, "{0} / {1}", slope, whole, weight=4)
    if weight is not None:
        shares = reshaped(builder, builder.expr(weight), (1, classes, 1))
        slope = formula(builder, "{0} * {1}", slope, shares)
    place = reshaped(builder, builder.expr(target), (outer, 1, inner))
    place = builder.expand(place, sizes)
    class_ = builder.pool.make(Coord, sizes, "int64", Layout(sizes, (0, 1, 0)))
    skip = builder.pool.make(Const, sizes, "int64", ignore)
    code = "abs(convert_{M}(({0} == {1}) & ({0} != {2})))"
    here = builder.apply(code, "bool", place, class_, skip)
    zero = builder.expr(0.0, sizes)
    dx = choose(builder, here, builder.expand(slope, sizes), zero)
    builder.define(node, reshaped(builder, dx, shape))
