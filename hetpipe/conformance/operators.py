"""Checks of operators against torch in float64: all cases, and inputs that break many kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hetpipe.check.difference import UNITS, case_tolerance, eps_of
from hetpipe.check.reference import float64_results
from hetpipe.conformance.cases import CASES, Case
from hetpipe.conformance.check import (
    CHECKS,
    Check,
    Level,
    NotAsked,
    check,
    expect,
    expect_refusal,
)
from hetpipe.conformance.rig import Rig, compare, forms_of
from hetpipe.sdk.graph import dtype_name, graph_outputs

aten = torch.ops.aten


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random float32 numbers with normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def judge(
    rig: Rig,
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    terms: int = 1,
    units: float = UNITS,
) -> None:
    """Run a function on the device and compare every result with torch in float64."""
    graph = rig.graph(fn, *inputs)
    actual = rig.results(rig.device.compile(graph), *inputs)
    expected = float64_results(fn, inputs)
    expect(
        len(actual) == len(expected),
        f"the run returned {len(actual)} results, it should return {len(expected)}",
    )
    for index, (array, wide, node) in enumerate(
        zip(actual, expected, graph_outputs(graph), strict=True)
    ):
        declared = dtype_name(node.meta["val"].dtype)
        where = f"result {index} (inputs {forms_of(inputs)})"
        expect(array.dtype.name == declared, f"{where} is {array.dtype}, it should be {declared}")
        eps = eps_of(declared, *(tensor.dtype for tensor in inputs))
        compare(array, wide, case_tolerance(wide, eps, terms, units), where)


def _of_case(case: Case, rig: Rig) -> None:
    if case.large and rig.info.capabilities.reference:
        raise NotAsked("a large case, which takes too long on a reference device")
    generator = torch.Generator().manual_seed(len(case.name))
    inputs = [feed.make(generator) for feed in case.feeds]
    judge(rig, case.fn, inputs, case.terms, case.tolerance)


CHECKS += [
    Check(
        f"operators/{case.name}",
        Level.TRAINING,
        "an operator that `supports` accepts computes what torch does in float64, within "
        f"{case.tolerance:g} * sqrt({case.terms}) * eps * the largest magnitude",
        "the kernel of an operator"
        + (" or of its gradient: boundaries, padding, sums" if case.has_gradients else ""),
        partial(_of_case, case),
        case.family + (", backward" if case.has_gradients else ""),
    )
    for case in CASES
]


def _in_dtype(case: Case, dtype: str, rig: Rig) -> None:
    if dtype not in rig.info.dtypes:
        raise NotAsked(f"{dtype} is not among its dtypes")
    generator = torch.Generator().manual_seed(len(case.name))
    inputs = [feed.make(generator) for feed in case.feeds]
    if case.large or not any(tensor.is_floating_point() for tensor in inputs):
        raise NotAsked("a case without floating inputs, or a large case")
    kind = getattr(torch, dtype)
    cast = [t.to(kind) if t.is_floating_point() else t for t in inputs]
    judge(rig, case.fn, cast, case.terms, 4 * case.tolerance)


CHECKS += [
    Check(
        f"precision/{case.name}, {dtype}",
        Level.FULL,
        f"an operator that `supports` accepts in {dtype} computes in {dtype}",
        f"a kernel that computes in another dtype than {dtype}, or has float32 constants",
        partial(_in_dtype, case, dtype),
        f"{case.family}, {dtype}",
    )
    for dtype in ("float64", "float16")  # bfloat16 is never uploaded
    for case in CASES
]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(4, 3, 6).permute(2, 0, 1),
    "sliced": lambda x: x[1::2, 2:5],
    "expanded": lambda x: x[:, :1].expand(12, 5),
    "flipped": lambda x: x.flip(0),
    "reshaped after a transpose": lambda x: x.t().reshape(9, 8),
    "selected": lambda x: x[3],
    "squeezed": lambda x: x.unsqueeze(1).squeeze(1),
}


def _strided(view: Callable[[torch.Tensor], torch.Tensor], rig: Rig) -> None:
    x = normal(12, 6)
    judge(rig, lambda x: view(x), [x])
    judge(rig, lambda x: view(x) + view(x) * 2.0, [x])
    judge(rig, lambda x, y: view(x) + y, [x, normal(*view(x).shape, seed=1)])
    judge(rig, lambda x: view(x).sum(-1), [x], 12)
    if view(x).ndim == 2:
        rows = view(x).shape[0]
        judge(rig, lambda x, w: torch.mm(w, view(x)), [x, normal(5, rows, seed=1)], rows)
        judge(rig, lambda x, w: torch.mm(view(x).t(), w), [x, normal(rows, 5, seed=1)], rows)


for _name, _view in VIEWS.items():
    check(
        f"strides/{_name}",
        "an operator reads the elements of a view, not the memory behind the view",
        "wrong stride handling: a kernel reads a view as a row-major tensor",
    )(partial(_strided, _view))


def _dtype(dtype: torch.dtype, fn: Callable[..., Any], values: list[Any], rig: Rig) -> None:
    if dtype_name(dtype) not in rig.info.dtypes:
        raise NotAsked(f"{dtype_name(dtype)} is not among its dtypes")
    judge(rig, fn, [torch.tensor(values, dtype=dtype)])


_WIDE = [2**40 + 1, -(2**53) - 1, 3, -7]
for _name, _dtype_, _fn, _values in (
    ("int64", torch.int64, lambda x: (x + 1, x * 3, x - x.flip(0)), _WIDE),
    ("int64 comparisons", torch.int64, lambda x: (x > 2**40, x == 2**40 + 1, x != x + 1), _WIDE),
    ("int64 sums", torch.int64, lambda x: x.sum(), _WIDE),
    ("int32", torch.int32, lambda x: (x + 1, x * 3), [2**30 + 1, -(2**24) - 1, 3]),
    ("int16", torch.int16, lambda x: (x + 1, x * 3), [257, -300, 3]),
    ("int8", torch.int8, lambda x: (x + 1, x * 2), [31, -60, 3]),
    ("uint8", torch.uint8, lambda x: (x + 1, x // 2), [255, 128, 3]),
    ("float64", torch.float64, lambda x: (x + 1.0, x * x, x / 3.0), [1 + 2.0**-40, 0.1, 1e200]),
    ("float64 functions", torch.float64, lambda x: (x.exp(), x.log(), x.sqrt()), [0.1, 2.0, 3.0]),
    ("float16", torch.float16, lambda x: (x + 1.0, x * x), [0.1, 3.0, 100.0]),
    ("bool", torch.bool, lambda x: (x & ~x, x | x.flip(0), x.to(torch.float32)), [True, False]),
):
    check(
        f"dtypes/{_name}",
        "a graph computes in the dtypes of its nodes",
        "a kernel that ignores the dtype and computes in a narrower one",
    )(partial(_dtype, _dtype_, _fn, _values))


@check(
    "dtypes/casts",
    "a cast from a wider float rounds to even, a cast to an integer truncates"
    " towards zero, and a cast to bool makes every number but 0 true",
    "a kernel that ignores the dtype, or a cast with another rounding",
)
def _(rig: Rig) -> None:
    x = torch.tensor([0.0, -0.0, 0.5, -1.5, 2.75, -3.25, 1e6])
    judge(rig, lambda x: (x.to(torch.int64), x.to(torch.bool)), [x])
    judge(rig, lambda x: x.to(torch.float32), [torch.tensor([0, 5, -3, 2**24 + 1])])


@check(
    "values/not finite",
    "infinities and NaN are ordinary values, and appear in the same elements as in torch",
    "fast-math options of a compiler, or a maximum that loses NaN",
)
def _(rig: Rig) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, float("inf"), float("-inf"), float("nan")])
    for fn in (
        lambda x: (x + 1.0, x * 0.0, x - x),
        lambda x: 1.0 / x,
        lambda x: (x > 0, x == x, x != x),
        torch.exp,
        torch.relu,
        lambda x: torch.where(x > 0, x, 0.0),
    ):
        judge(rig, fn, [x])
    judge(rig, lambda x: x.amax(-1), [torch.stack([x, x.flip(0)])])


SMALLEST = 2.0**-126
"""The smallest normal float32; smaller numbers are denormal."""


@check(
    "values/denormals",
    "a device keeps numbers below the smallest normal number, or declares "
    "capabilities.flushes_denormals; copies keep every bit",
    "a compiler or a mode of the device that flushes denormals, which the backend does not declare",
)
def _(rig: Rig) -> None:
    x = torch.tensor([1.0, 0.5, 0.25, 3e-3, -0.5, -1e-4, 0.0] * 5) * SMALLEST
    copied = rig.get(rig.put(x))
    expect(copied.tobytes() == x.numpy().tobytes(), "a copy of denormal numbers has other bits")
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "x + x": lambda x: x + x,
        "x * 0.5": lambda x: x * 0.5,
        "y * 2^-101": lambda x: (x * 2.0**100) * 2.0**-101,
        "-x": lambda x: -x,
    }
    for name, fn in functions.items():
        try:
            (actual,) = rig.results(rig.compile(fn, x), x)
        except NotAsked:
            continue
        right = fn(x).numpy()
        off = actual != right
        flushed = off & (actual == 0) & (np.abs(right) < SMALLEST)
        flushed |= off & (np.abs(x.numpy()) < SMALLEST) & (actual == 0)
        if (off & ~flushed).any():
            compare(actual, right, 0.0, f"{name} of denormal numbers")
        expect(
            not off.any() or rig.info.capabilities.flushes_denormals,
            f"{name} of denormal numbers: {int(off.sum())} of {x.numel()} elements are 0, the "
            f"first of them should be {right[int(np.argmax(off))]:.4g}; if the device cannot keep "
            "such numbers, declare capabilities.flushes_denormals",
        )


@check("values/no elements", "a tensor may have no elements", "a launch with a size of zero")
def _(rig: Rig) -> None:
    judge(rig, lambda x, y: (x + y, x.t()), [torch.zeros(0, 3), torch.zeros(0, 3)])
    judge(rig, lambda x: x.sum(0), [torch.zeros(0, 3)])
    judge(rig, torch.mm, [torch.zeros(2, 0), torch.zeros(0, 3)])


@check(
    "values/no dimensions",
    "a tensor may have no dimensions",
    "a shape () that the device treats as (0,)",
)
def _(rig: Rig) -> None:
    x, y = torch.tensor(3.0), torch.tensor(-2.0)
    judge(rig, lambda x, y: (x + y, x * y, x.exp()), [x, y])
    judge(rig, lambda x: (x.sum(), x.view(1)), [x])
    judge(rig, lambda x, y: x + y, [x, normal(3)])


@check(
    "values/index out of range",
    "an index out of range raises BackendError, and does not read or write other memory",
    "an index that the device does not check; use hetpipe.sdk.index_bounds",
)
def _(rig: Rig) -> None:
    table = normal(5, 3)
    functions: list[tuple[Callable[..., Any], list[torch.Tensor]]] = [
        (lambda t, i: aten.index_select(t, 0, i), [table, torch.tensor([0, 5])]),
        (lambda t, i: aten.gather(t, 0, i), [table, torch.tensor([[0, -1, 2]])]),
        (lambda t, i: aten.embedding(t, i), [table, torch.tensor([1, 70])]),
        (lambda t, i: aten.index(t, [i]), [table, torch.tensor([1, 5])]),
    ]
    asked = 0
    for fn, (values, indices) in functions:
        valid = indices.clamp(0, 4)
        try:
            executable = rig.compile(fn, values, valid)
        except NotAsked:
            continue
        asked += 1
        judge(rig, fn, [values, valid])
        bad = [int(i) for i in indices.flatten() if not 0 <= i < 5]
        run = partial(rig.results, executable, values, indices)
        expect_refusal(run, f"a run with the indices {bad} in a dimension of 5 rows")
    if not asked:
        raise NotAsked("refused: all operators with indices")
