"""Batched products of interleaved matrices, such as attention heads, without copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_devices import fetch, trace
from hetpipe.backends.opencl.lower.lowering import lower
from opencl_devices import close_to_torch, compiled, opencl_device, upload
from opencl_products import OPENCL

from hetpipe.sdk.host.registry import get_backend

on_every_device = pytest.mark.parametrize("device_id", OPENCL)
SIZES = [(2, 3, 29, 36), (3, 2, 48, 32), (1, 5, 40, 17), (4, 1, 24, 64)]
"""Samples, heads, length and head width: whole and incomplete tiles, one sample or one head."""


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape (samples, length, heads * width) to (samples, heads, length, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """Invert `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def check(device_id: str, fn: Callable[..., Any], *inputs: torch.Tensor, runs: list[str]) -> None:
    """Check `fn` against float64, and its launches against `runs`; a copy would be `fused`."""
    close_to_torch(opencl_device(device_id), fn, *inputs, ulps=256)
    graph = trace(fn, inputs, get_backend("opencl").decompositions())
    launches = lower(graph, opencl_device(device_id).target).launches
    assert [launch.kernel.name.partition("_")[0] for launch in launches] == runs


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_every_device
def test_heads_are_read_without_a_copy(device_id: str, size: tuple[int, int, int, int]) -> None:
    samples, heads, length, width = size
    x, y = tensors(*[(samples, length, heads * width)] * 2)
    scores = torch.randn(samples, heads, length, length)

    def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return split_heads(x, heads) @ split_heads(y, heads).transpose(-2, -1)

    check(device_id, products, x, y, runs=["matmul"])
    check(device_id, lambda s, x: s @ split_heads(x, heads), scores, x, runs=["matmul"])
    check(device_id, lambda s, x: s.mT @ split_heads(x, heads), scores, x, runs=["matmul"])


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_every_device
def test_heads_are_written_without_a_copy(device_id: str, size: tuple[int, int, int, int]) -> None:
    samples, heads, length, width = size
    (x,) = tensors((samples, length, heads * width))
    scores = torch.randn(samples, heads, length, length)

    def turned(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return merge_heads((split_heads(x, heads).mT @ s).mT)

    check(
        device_id, lambda s, x: merge_heads(s @ split_heads(x, heads)), scores, x, runs=["matmul"]
    )
    check(device_id, turned, x, scores, runs=["matmul"])


@pytest.mark.slow
@on_every_device
def test_a_product_is_kept_beside_its_copy(device_id: str) -> None:
    x, scores = tensors((2, 29, 108), (2, 3, 29, 29))

    def fn(s: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = s @ split_heads(x, 3)
        return merge_heads(product), product, merge_heads(product) * 2

    close_to_torch(opencl_device(device_id), fn, scores, x, ulps=256)


@on_every_device
def test_operands_with_different_splits_are_copied(device_id: str) -> None:
    x, y = tensors((3, 29, 2 * 36), (2, 36, 3 * 29))

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return split_heads(x, 2).flatten(0, 1) @ split_heads(y, 3).flatten(0, 1)

    check(device_id, fn, x, y, runs=["fused", "fused", "matmul"])


@pytest.mark.slow
def test_a_result_in_another_order_does_not_replace_an_input() -> None:
    device = opencl_device(OPENCL[0])
    x, scores, residual = tensors((2, 29, 108), (2, 3, 29, 29), (2, 29, 108))

    def fn(s: torch.Tensor, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return merge_heads(s @ split_heads(x, 3) * split_heads(r, 3))

    graph = trace(fn, (scores, x, residual), get_backend("opencl").decompositions())
    executable = compiled(device, fn, scores, x, residual)
    assert lower(graph, device.target).outputs[0].heirs == ()
    buffers, events = upload(device, scores, x, residual)
    (result,), event, _ = executable.run(buffers, frozenset(range(3)), events)
    found = torch.from_numpy(fetch(device, result, [event]))
    torch.testing.assert_close(found, fn(scores, x, residual))


@on_every_device
def test_a_batched_product_of_one_element_may_lose_its_dimensions(device_id: str) -> None:
    a, b = tensors((1, 1, 9), (1, 9, 1))
    check(device_id, lambda a, b: (a @ b).squeeze(), a, b, runs=["matmul"])


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(24))
@on_every_device
def test_any_order_of_dimensions(device_id: str, seed: int) -> None:
    """Both operands and the result have their four dimensions in a random memory order."""
    choose = random.Random(seed)
    samples, heads, rows, cols, depth = (
        choose.choice(sizes) for sizes in ([1, 2, 3], [1, 2, 3], *[[17, 24, 40]] * 3)
    )
    orders = [choose.sample(range(4), 4) for _ in range(3)]

    def stored(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
        return tuple(shape[d] for d in order)

    def seen(x: torch.Tensor, order: list[int]) -> torch.Tensor:
        return x.permute([order.index(d) for d in range(4)])

    x, y = tensors(
        stored((samples, heads, rows, depth), orders[0]),
        stored((samples, heads, depth, cols), orders[1]),
    )

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = seen(x, orders[0]) @ seen(y, orders[1])
        turned = product.permute(orders[2])
        return turned.reshape(-1) + 1 if seed % 2 else turned

    close_to_torch(opencl_device(device_id), fn, x, y, ulps=256)
