"""Operators on views of odd shapes, dtypes and values: OpenCL devices agree with torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import ACCEPTED, REFUSED, outcomes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from hetpipe.check.reference import float64_results, tensors_of
from hetpipe.conformance.check import NotAsked
from hetpipe.conformance.rig import Rig
from hetpipe.sdk.host.registry import discover_devices, open_device

DEVICES = [
    info.id
    for info in discover_devices()[0]
    if info.backend == "opencl" and "oclgrind" not in info.id  # takes seconds per case
]
SUITE = 16  # cases; each compiles a kernel
UNITS = 64.0  # in the last place, beyond the error of torch
FLOATS, INTEGERS = ("float32", "float64"), ("int64", "int32", "int8", "uint8", "bool")
SIZES = st.sampled_from([0, 1, 2, 3, 5, 16, 17, 33])
EXACT = [math.nan, math.inf, -math.inf, 0.0, -0.0]
SPECIAL = [*EXACT, 1e-40, 3e38, -3e38, 1e8, 2.5, -0.5, 88.0]


def words(text: str) -> list[str]:
    return text.split()


UNARY = {
    "float": words("""abs neg exp exp2 expm1 log log1p log2 sin cos tan tanh sinh asin atan sqrt
    rsqrt reciprocal erf erfc sigmoid floor ceil round trunc sign sgn relu frac square isnan isinf
    signbit logical_not nan_to_num"""),
    "int": words("abs neg sign sgn relu square logical_not bitwise_not signbit isinf sqrt"),
}
BINARY = {
    "float": words("""add sub mul div maximum minimum atan2 fmod remainder pow eq lt ge fmax fmin
    copysign floor_divide logical_xor hypot"""),
    "int": words("""add sub mul div maximum minimum eq lt ge logical_and bitwise_or bitwise_xor fmod
    remainder floor_divide"""),
}
REDUCED = {
    "float": words("sum mean prod amax argmin cumsum cummax softmax logsumexp var any"),
    "int": words("sum prod amax argmin any all cumsum cumprod cummin"),
}


@dataclass(frozen=True)
class Case:
    """An operator on a view of a tensor with random `values`, given by their seed."""

    kind: str
    name: str
    dtype: str
    other: str
    shape: tuple[int, ...]
    steps: tuple[tuple[str, int, int], ...]
    dim: int
    values: int

    def tensor(self, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        """Return normal numbers, some of them special, or small integers."""
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)
        if dtype not in FLOATS:
            low = 0 if dtype in ("uint8", "bool") else -9
            return torch.randint(low, 10 if dtype != "bool" else 2, shape, generator=generator).to(
                kind
            )
        x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        # Whether a sum of numbers near the largest overflows depends on its order.
        special = torch.tensor(EXACT if self.kind == "reduced" else SPECIAL, dtype=torch.float64)
        at = torch.randint(4 * len(special), shape, generator=generator)
        if seed % 2:
            x = torch.where(at < len(special), special[at.clamp(max=len(special) - 1)], x)
        return x.float().to(kind)

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of `x`, without the steps that its rank does not allow."""
        for name, a, b in self.steps:
            dim = a % max(x.dim(), 1)
            if name == "expand":
                x = x.unsqueeze(0).expand(2, *x.shape)
            elif x.dim() and name == "flip":
                x = x.flip(dim)
            elif x.dim() and name == "narrow":
                x = x[(slice(None),) * dim + (slice(b % (x.shape[dim] + 1), None, 1 + b % 3),)]
            elif x.dim() > 1 and name == "transpose":
                x = x.transpose(dim, b % x.dim())
            elif x.dim() and x.shape[dim] and name == "select":
                x = x.select(dim, b % x.shape[dim])
        return x

    def function(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        """Apply the operator to the view."""
        call: Callable[..., Any] = getattr(torch, self.name)
        seen = self.view(x)
        if self.kind == "reduced":
            return call(seen, dim=self.dim % max(seen.dim(), 1))
        return call(seen, *others)

    def inputs(self) -> list[torch.Tensor]:
        """Return the tensors that `function` receives."""
        x = self.tensor(self.shape, self.dtype, self.values)
        if self.kind != "binary":
            return [x]
        other = self.tensor(tuple(self.view(x).shape), self.other, self.values + 2)
        if self.name in ("fmod", "remainder", "floor_divide") and self.other not in FLOATS:
            other = torch.where(other == 0, torch.ones_like(other), other)
        return [x, other]


@composite
def cases(draw: DrawFn) -> Case:
    dtype = draw(st.sampled_from([*FLOATS, *FLOATS, *INTEGERS]))
    kind = draw(st.sampled_from(["unary", "binary", "reduced"]))
    family = "float" if dtype in FLOATS else "int"
    table = {"unary": UNARY[family], "binary": BINARY[family], "reduced": REDUCED[family]}[kind]
    steps = st.tuples(
        st.sampled_from(["expand", "flip", "narrow", "transpose", "select"]),
        st.integers(0, 3),
        st.integers(0, 20),
    )
    return Case(
        kind,
        draw(st.sampled_from(table)),
        dtype,
        draw(st.sampled_from([dtype, dtype, *(FLOATS if family == "float" else INTEGERS)])),
        tuple(draw(st.lists(SIZES, max_size=3))),
        tuple(draw(st.lists(steps, max_size=3))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2**20)),
    )


def wrong(got: np.ndarray[Any, Any], own: Any, wide: Any, across: bool) -> Any:
    """Return which elements differ from torch's and are not within rounding of float64's.

    With `across`, for reductions, rounding is relative to the largest element.
    """
    if got.dtype.kind != "f":
        return (got != own) & (got != wide)
    with np.errstate(all="ignore"):
        g, n = got.astype("float64"), own.astype("float64")
        finite = np.abs(wide[np.isfinite(wide)])
        scale = np.maximum(np.abs(wide), finite.max(initial=0.0)) if across else np.abs(wide)
        limits = np.finfo(got.dtype)
        of_torch = np.where(np.isfinite(n - wide), np.abs(n - wide), 0)
        bound = UNITS * limits.eps * scale + 16 * of_torch + 4 * limits.tiny
        same = (g == wide) | (g == n) | (np.isnan(g) & (np.isnan(n) | np.isnan(wide)))
        return ~(same | (np.abs(g - wide) <= bound))


def attempt(rig: Rig, case: Case) -> str:
    inputs = case.inputs()
    try:
        own = [tensor.numpy() for tensor in tensors_of(case.function(*inputs))]
        wide = float64_results(case.function, inputs)
    except (RuntimeError, IndexError):
        return REFUSED  # by torch
    try:
        graph = rig.graph(case.function, *inputs)
    except NotAsked:
        return REFUSED
    found = rig.results(rig.device.compile(graph), *inputs)
    for got, near, far in zip(found, own, wide, strict=True):
        assert (got.shape, got.dtype) == (near.shape, near.dtype)
        bad = wrong(got, near, far, case.kind == "reduced")
        assert not bad.any(), f"{got[bad][0]!r} for {far[bad][0]!r}, {bad.sum()} of {bad.size}"
    return ACCEPTED


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")  # torch warns, e.g. about a variance of one element
@pytest.mark.parametrize("device", DEVICES)
def test_operators(device: str) -> None:
    rig = Rig(open_device(device))
    counts = outcomes(cases(), lambda case: attempt(rig, case), SUITE)
    assert counts[ACCEPTED] > counts[REFUSED], counts
