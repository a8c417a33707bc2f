"""Operators as matrix products: their shapes, and the operations that torch counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hetpipe.cost.work import Kernel, ProductShape
from hetpipe.profile.count import count_calls

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[ProductShape]]] = {
    "plain": (
        (6, 4, 3, 2), {},
        [ProductShape(1, 6, 98, 24), ProductShape(1, 4, 144, 36), ProductShape(1, 6, 24, 98)],
    ),
    "groups": (
        (6, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1},
        [ProductShape(2, 3, 40, 18), ProductShape(2, 2, 144, 27), ProductShape(2, 3, 18, 40)],
    ),
    "transposed": (
        (4, 6, 3, 3), {"stride": 2},
        [ProductShape(1, 6, 646, 36), ProductShape(1, 4, 144, 54), ProductShape(1, 4, 54, 144)],
    ),
}  # fmt: skip
"""The weight, the settings, and the products of forward, input gradient and weight gradient."""


def kernels(fn: Callable[..., Any], *inputs: torch.Tensor) -> list[Kernel]:
    """Return the operators of a function that are matrix products."""
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    return [kernel for _, kernel in count_calls(graph) if kernel.products]


def test_matrix_products() -> None:
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(7)
    batches = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
    (biased,) = kernels(lambda a, b, c: torch.addmm(c, a, b) + 1, a, b, c)
    (batched,) = kernels(torch.bmm, *batches)
    assert biased.products == (ProductShape(1, 3, 7, 5),)
    assert batched.products == (ProductShape(2, 3, 7, 5),)
    for kernel in (biased, batched):
        assert kernel.operations == 2 * kernel.products[0].macs


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients(name: str) -> None:
    weight, how, shapes = CONVOLUTIONS[name]
    run = functional.conv_transpose2d if name == "transposed" else functional.conv2d
    x, w = torch.ones(2, 4, 9, 8), torch.ones(weight)
    dy = torch.ones_like(run(x, w, **how))

    def both(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
        y, gradients = torch.func.vjp(lambda x, w: run(x, w, **how), x, w)
        return y, gradients(dy)

    forward, backward = kernels(both, x, w, dy)
    assert [*forward.products, *backward.products] == shapes
    if name != "transposed":
        assert forward.operations == 2 * shapes[0].macs
