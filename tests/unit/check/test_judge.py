"""The reference values of `hetpipe.check` where sums overflow."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.check.difference import tensor_difference
from hetpipe.check.reference import reference_values
from hetpipe.sdk.graph import canonical, graph_outputs

LARGE = 3e38


def reference_value(
    fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """Return the reference value of `fn(x, w)`."""
    graph = canonical(make_fx(lambda x, w: (fn(x, w),), tracing_mode="fake")(x, w))
    (result,) = graph_outputs(graph)
    value = reference_values(graph, [x, w])[result]
    assert isinstance(value, torch.Tensor)
    return value


def test_an_overflowing_sum_allows_any_value() -> None:
    """The order of a sum decides whether infinities of both signs meet, so a device may have NaN
    there and in all later results."""
    x, w = torch.tensor([[LARGE, LARGE, -1.0]]), torch.ones(3, 2)
    w[:, 1] = 1e-30
    value = reference_value(lambda x, w: torch.sigmoid(x @ w), x, w)
    assert value.isnan().tolist() == [[True, False]]
    own = torch.tensor([[math.nan, 1.0]])
    assert not tensor_difference(own, value, 3).is_wrong
    own[0, 1] = math.nan
    assert tensor_difference(own, value, 3).is_wrong


def test_an_infinite_input_stays_infinite() -> None:
    x, w = torch.tensor([[-math.inf, 1.0]]), torch.ones(2, 1)
    assert reference_value(lambda x, w: x @ w, x, w).tolist() == [[-math.inf]]


def test_an_overflowing_element_is_infinite() -> None:
    x, w = torch.tensor([[LARGE]]), torch.tensor([[10.0]])
    assert reference_value(lambda x, w: x * w, x, w).tolist() == [[math.inf]]
