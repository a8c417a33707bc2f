"""Volumes, searches and special functions on OpenCL, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opencl_devices import IDS, close_to_torch, opencl_device
from torch.nn import functional as F

aten = torch.ops.aten
pytestmark = [pytest.mark.wide, pytest.mark.parametrize("device_id", IDS)]


def normal(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns fn's value and the gradients of its sum of squares."""

    def both(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
        with torch.enable_grad():
            value = fn(*inputs)
            wanted = [x for x in inputs if x.requires_grad]
            return value.detach(), *torch.autograd.grad((value * value).sum(), wanted)

    return both


VOLUME = (1, 2, 4, 5, 3)
POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "largest": lambda x: F.max_pool3d(x, 2, 1),
    "largest, with a border": lambda x: F.max_pool3d(x, (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 2, 1)),
    "largest, rounded up": lambda x: F.max_pool3d(x, 2, 3, 1, ceil_mode=True),
    "mean": lambda x: F.avg_pool3d(x, 2, 1),
    "mean, with a border": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True),
    "mean without the border": lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False),
    "mean by a number": lambda x: F.avg_pool3d(x, 2, 1, divisor_override=3),
    "largest of bins": lambda x: F.adaptive_max_pool3d(x, (3, 2, 2)),
    "largest of bins of an image": lambda x: F.adaptive_max_pool2d(x[0], (3, 2)),
    "largest of bins of a line": lambda x: F.adaptive_max_pool1d(x[0, 0], 4),
    "mean of bins": lambda x: F.adaptive_avg_pool3d(x, (3, 7, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_pooling(device_id: str, name: str) -> None:
    close_to_torch(opencl_device(device_id), with_gradients(POOLS[name]), normal(*VOLUME))


@pytest.mark.slow
def test_indices_of_the_largest_elements(device_id: str) -> None:
    """The first of equal elements counts; NaN is larger than any number."""
    x = torch.tensor([3.0, 3, 1, math.nan, 2, 2, 2, 1, 1, -math.inf, 5, 5]).reshape(1, 3, 2, 2)

    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sliding = F.max_pool3d(x, 2, 1, return_indices=True)
        return *sliding, *F.adaptive_max_pool3d(x, (2, 1, 1), return_indices=True)

    close_to_torch(opencl_device(device_id), places, x)


CONVOLUTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": lambda x, w, b: F.conv3d(x, w, b),
    "strides, border, dilation": lambda x, w, b: F.conv3d(x, w, b, (2, 1, 1), (1, 2, 0), (1, 2, 1)),
    "transposed": lambda x, w, b: F.conv_transpose3d(x, w, b, (2, 1, 2), (1, 0, 1), (1, 0, 1)),
    "transposed, dilated": lambda x, w, b: F.conv_transpose3d(x, w, b, 1, 1, 0, 1, (2, 1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_of_volumes(device_id: str, name: str) -> None:
    inputs = normal(2, 2, 4, 4, 3), normal(2, 2, 3, 2, 2, seed=8), normal(2, seed=9)
    device = opencl_device(device_id)
    close_to_torch(device, with_gradients(CONVOLUTIONS[name]), *inputs, ulps=256)


NUMBERS = torch.tensor([0.1, 0.5, 1.0, 2.5, 7.9, 8.1, 30.0, -0.3, -2.6, -7.25, 0.0])
SPECIAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "i0": lambda x: torch.special.i0(x / 4),
    "i0e": torch.special.i0e,
    "i1": lambda x: torch.special.i1(x / 4),
    "i1e": torch.special.i1e,
    "erfinv": lambda x: torch.erfinv(x / 31),
    "erfcx": lambda x: torch.special.erfcx(x.abs() - 1),
    "log_ndtr": torch.special.log_ndtr,
    **{f"polygamma {n}": lambda x, n=n: torch.polygamma(n, x[:7]) for n in (1, 2, 3)},
    "polygamma of negative numbers": lambda x: torch.polygamma(1, x[7:10]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions(device_id: str, name: str) -> None:
    close_to_torch(opencl_device(device_id), SPECIAL[name], NUMBERS)


EDGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "i0e": lambda x: torch.special.i0e(x),
    "i1e": lambda x: torch.special.i1e(x.clamp(-1e30, 1e30)),
    "erfinv": lambda x: torch.erfinv(x),
    "erfcx": lambda x: torch.special.erfcx(x.abs()),
}


@pytest.mark.parametrize("name", EDGES)
def test_special_functions_at_their_edges(device_id: str, name: str) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -1.0, 0.0, 1.5])
    close_to_torch(opencl_device(device_id), EDGES[name], x)


ORDERED = torch.tensor([[0.0, 1, 1, 3, math.inf], [-2, 0, 0, 5, 9]])
VALUES = torch.tensor([[1.0, 0, math.nan, 4, -3], [0, 5, 9, -2, math.nan]])
SEARCHES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "searchsorted": lambda s, v: torch.searchsorted(s, v),
    "searchsorted to the right": lambda s, v: torch.searchsorted(s, v, right=True),
    "in one row": lambda s, v: (
        torch.searchsorted(s[1], v, out_int32=True),
        torch.searchsorted(s[1], 0),
    ),
    "bucketize": lambda s, v: torch.bucketize(v, s[1]),
    "mode": lambda s, v: (*torch.mode(s, 1), *torch.mode(s, 0, keepdim=True)),
    "written by strides": lambda s, v: torch.as_strided_scatter(s, v[:, :3], (2, 3), (5, 2), 0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(device_id: str, name: str) -> None:
    close_to_torch(opencl_device(device_id), SEARCHES[name], ORDERED, VALUES)


def test_take(device_id: str) -> None:
    index = torch.tensor([[0, -1], [7, 3]])
    close_to_torch(opencl_device(device_id), lambda x, i: torch.take(x, i), ORDERED, index)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, math.inf])
def test_distances_of_pairs(device_id: str, p: float) -> None:
    fn = with_gradients(lambda x: F.pdist(x, p))
    close_to_torch(opencl_device(device_id), fn, normal(5, 3))
    close_to_torch(opencl_device(device_id), lambda x: F.pdist(x, p), normal(1, 3))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margins(device_id: str, reduction: str) -> None:
    def fn(x: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        one = F.multi_margin_loss(x, target, reduction=reduction)
        weighted = F.multi_margin_loss(x, target, 2, 0.7, x[0].detach().abs(), reduction=reduction)
        return one + weighted + F.multilabel_margin_loss(x, labels, reduction=reduction)

    labels = torch.tensor([[0, 3, -1, 2], [1, -1, -1, -1], [0, 1, 2, 3]])
    inputs = normal(3, 4), torch.tensor([0, 3, 2]), labels
    close_to_torch(opencl_device(device_id), with_gradients(fn), *inputs)


PRODUCTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum of nothing": lambda x: torch.mm(x[:, :0], x[:0]),
    "no rows": lambda x: torch.mm(x[:0], x.t()),
    "in batches": lambda x: torch.bmm(x[None, :, :0], x[None, :0]),
    "beside a tensor": lambda x: torch.addmm(x[0], x[:, :0], x[:0], beta=2),
    "in its place": lambda x: torch.addmm(x[0], x[:, :0], x[:0], beta=0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_empty_tensors(device_id: str, name: str) -> None:
    close_to_torch(opencl_device(device_id), PRODUCTS[name], normal(3, 4))


DOUBLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: F.log_softmax(x, 0, dtype=torch.float64),
    "layer_norm": lambda x: F.layer_norm(x.double(), (4,)),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_in_double(device_id: str, name: str) -> None:
    device = opencl_device(device_id)
    if "float64" not in device.info.dtypes:
        pytest.skip("no float64")
    close_to_torch(device, with_gradients(DOUBLES[name]), normal(3, 4), ulps=1)


def test_indexing_a_tensor_without_dimensions(device_id: str) -> None:
    """A 0-d tensor has a dimension 0 here, but no size to divide by."""

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.index_select(0, i), x.index_add(0, i, s), x.index_copy(0, i, s), x.gather(0, i[0])

    inputs = normal(1)[0].clone(), torch.tensor([0]), normal(1, seed=9)[0].clone()
    close_to_torch(opencl_device(device_id), fn, *inputs)
