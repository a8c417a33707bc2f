"""Operators beyond core ATen: sorting, running results, indexed writes, gradients of resizing."""

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


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


ODD = torch.tensor([[2.0, 1.0, 2.0, math.nan, 1.0], [0.0, -0.0, math.inf, -math.inf, 3.0]])
WHOLE = torch.tensor([[3, 1, 2, 3, 1], [5, 4, 4, 0, 5]])
SORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda x: torch.sort(x, stable=True),
    "sort down": lambda x: torch.sort(x, dim=0, descending=True, stable=True),
    "msort": lambda x: torch.msort(x),
    "argsort": lambda x: torch.argsort(x, dim=-1, stable=True),
    "topk": lambda x: torch.topk(x, 2)[0],
    "smallest": lambda x: torch.topk(x, 2, dim=0, largest=False)[0],
    "kthvalue": lambda x: torch.kthvalue(x, 2, keepdim=True)[0],
    "median": lambda x: torch.median(x, 1)[0],
    "median of all": lambda x: torch.median(x),
    "cummax": lambda x: torch.cummax(x, 1),
    "cummin": lambda x: torch.cummin(x, -1),
    "cumprod": lambda x: torch.cumprod(x, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float", "int"])
@pytest.mark.parametrize("name", SORTS)
def test_order(device_id: str, name: str, dtype: str) -> None:
    close_to_torch(opencl_device(device_id), SORTS[name], ODD if dtype == "float" else WHOLE)


FLOATING: dict[str, Callable[[torch.Tensor], Any]] = {
    "nanmedian": lambda x: torch.nanmedian(x, 1)[0],
    "nanmedian of all": lambda x: torch.nanmedian(x),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "signbit": lambda x: torch.signbit(x),
    "angle": lambda x: torch.angle(x),
    "fmax": lambda x: torch.fmax(x.clamp(-9, 9), x.clamp(-9, 9).flip(1)),
    "copysign": lambda x: torch.copysign(x.clamp(-9, 9), x.flip(1)),
}


@pytest.mark.parametrize("name", FLOATING)
def test_floating(device_id: str, name: str) -> None:
    close_to_torch(opencl_device(device_id), FLOATING[name], ODD)


def test_lgamma_and_its_derivative(device_id: str) -> None:
    x = torch.tensor([0.1, 0.5, 1.0, 1.46, 2.0, 7.3, 40.0, -0.3, -2.7])
    close_to_torch(opencl_device(device_id), lambda x: (torch.lgamma(x), torch.digamma(x)), x)


INDEX = torch.tensor([[0, 2, 0], [3, 2, 0]])  # some indices twice
SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "overwrite": lambda x, i, s: x.scatter(0, i, s),
    "other dimension": lambda x, i, s: x.scatter(-1, i[:, :2], s),
    "a number": lambda x, i, s: x.scatter(0, i, 2.5),
    "add": lambda x, i, s: x.scatter_add(0, i, s),
    "add to lines": lambda x, i, s: x.scatter_add(1, i, s),
    **{
        f"{how}, {'with' if own else 'without'} itself": (
            lambda x, i, s, how=how, own=own: x.scatter_reduce(0, i, s, how, include_self=own)
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    "no place": lambda x, i, s: x.scatter(0, i[:0], s),
    "one element": lambda x, i, s: x[0, 0].scatter(0, i[0, 0] * 0, s[0, 0]),
    "index_reduce": lambda x, i, s: aten.index_reduce(x, 1, i[0], s.repeat(2, 1)[:, :3], "amax"),
    "put": lambda x, i, s: (torch.put(x, i, s[:, :3]), torch.put(x, i, s[:, :3], accumulate=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters(device_id: str, name: str, dtype: torch.dtype) -> None:
    x, source = (normal(*shape) * 4 for shape in ((4, 4), (2, 4)))
    if dtype == torch.int64 and name.startswith("mean"):
        source = source.abs()  # torch's rounding of negative means depends on the order
        x = x.abs()
    inputs = x.to(dtype), INDEX, source.to(dtype)
    close_to_torch(opencl_device(device_id), SCATTERS[name], *inputs)


PUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, i, v: aten.index_put(x, [i], v),
    "the last stays": lambda x, i, v: aten.index_put(x, [i * 0], v),
    "columns": lambda x, i, v: aten.index_put(x, [None, i], v[:, :3]),
    "behind": lambda x, i, v: aten.index_put(x, [None, None, i], v[0, 0, :3]),
    "with a gap": lambda x, i, v: aten.index_put(x, [i, None, i], v[:, 0]),
    "with a gap, added": lambda x, i, v: aten.index_put(x, [i, None, i * 0], v[:, 0], True),
    "a pair behind": lambda x, i, v: aten.index_put(x, [None, i, i - 3], v[0, 0, :3]),
    "one value": lambda x, i, v: aten.index_put(x, [i], v[0, 0, 0]),
    "nothing": lambda x, i, v: aten.index_put(x, [i[:0]], v[:0]),
}


@pytest.mark.parametrize("name", PUTS)
def test_index_put(device_id: str, name: str) -> None:
    index = torch.tensor([2, 0, 1])
    values = {"columns": (3, 3, 4), "with a gap": (3, 1, 4), "with a gap, added": (3, 1, 4)}
    inputs = normal(3, 4, 4), index, normal(*values.get(name, (3, 4, 4)))
    if name == "columns":
        inputs = inputs[0], index, normal(3, 3, 4)
    close_to_torch(opencl_device(device_id), PUTS[name], *inputs)


RESIZES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "linear": ((2, 3, 5), lambda x: F.interpolate(x, size=8, mode="linear")),
    "linear to the corners": (
        (2, 3, 5),
        lambda x: F.interpolate(x, size=3, mode="linear", align_corners=True),
    ),
    "bilinear": ((2, 3, 5, 4), lambda x: F.interpolate(x, size=(3, 9), mode="bilinear")),
    "bilinear, scaled": (
        (1, 2, 5, 4),
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    ),
    "bicubic": ((1, 2, 5, 4), lambda x: F.interpolate(x, size=(7, 3), mode="bicubic")),
    "bicubic to the corners": (
        (1, 2, 5, 4),
        lambda x: F.interpolate(x, size=(7, 3), mode="bicubic", align_corners=True),
    ),
    "trilinear": ((1, 2, 3, 4, 2), lambda x: F.interpolate(x, size=(4, 3, 5), mode="trilinear")),
    "nearest": ((1, 2, 3, 4, 2), lambda x: F.interpolate(x, size=(4, 3, 5))),
    "nearest-exact": (
        (1, 2, 3, 4, 2),
        lambda x: F.interpolate(x, size=(4, 3, 5), mode="nearest-exact"),
    ),
    "border": ((1, 2, 3, 4), lambda x: F.pad(x, (1, 2, 0, 3), mode="replicate")),
    "border, cut": ((1, 2, 3, 4), lambda x: F.pad(x, (-1, 2, 1, -1), mode="replicate")),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resizing_and_its_gradient(device_id: str, name: str) -> None:
    shape, resize = RESIZES[name]

    def both(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = resize(x)
            return y.detach(), *torch.autograd.grad(y, [x], dy)

    x = normal(*shape)
    close_to_torch(opencl_device(device_id), both, x, normal(*resize(x).shape))


@pytest.mark.slow
def test_distances_and_their_gradient(device_id: str) -> None:
    for p in (1.0, 2.0, 3.0, math.inf):

        def both(a: torch.Tensor, b: torch.Tensor, p: float = p) -> tuple[torch.Tensor, ...]:
            a = a.detach().requires_grad_()
            with torch.enable_grad():
                y = torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist")
                return y.detach(), *torch.autograd.grad((y * y).sum(), [a])

        close_to_torch(opencl_device(device_id), both, normal(4, 3), normal(5, 3))


def test_gradients_of_shrinking(device_id: str) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            total = F.softshrink(x, 0.7).sum() + (F.hardshrink(x, 0.7) * x).sum()
            return torch.autograd.grad(total, [x])

    close_to_torch(opencl_device(device_id), both, normal(5, 4))
