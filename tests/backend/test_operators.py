"""Every operator, on every device of this machine, against torch in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import infos, opened, run, trace
from hetpipe.backends.numpy.operators import OPERATORS
from torch import fx

from hetpipe.conformance.cases import CASES, Case
from hetpipe.conformance.cases.case import Feed, r
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import graph_calls, operator_name
from hetpipe.sdk.host.registry import get_backend

aten = torch.ops.aten


def _after(name: str, first: Callable[[Any], Any]) -> Case:
    """Return a case of an operator that is defined only on the range of `first`."""
    operator = getattr(aten, name).default
    return Case("elementwise", name, lambda a: operator(first(a)), (r(3, 5),))


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def _scatter_reduced(a: Any, s: Any, index: Any) -> Any:
    return [
        aten.scatter_reduce.two(a, 0, index, s, how, include_self=with_self)
        for how in ("sum", "prod", "mean", "amax", "amin")
        for with_self in (True, False)
    ]


BEYOND_REFERENCE = {"conv1d", "conv_transposed", "max_pool_ceil"}
"""All cases that numpy refuses even with its own decompositions."""

UNARY = "asinh atan cosh erfc exp2 sinh tan"
WITHIN_ONE = "acos asin atanh"
ABOVE_ONE = "acosh lgamma log10"
BINARY = "copysign.Tensor fmax.default fmin.default nextafter.default"
REFERENCE_CASES = [
    *(Case("elementwise", n, getattr(aten, n).default, (r(3, 5),)) for n in UNARY.split()),
    *(_after(n, lambda a: torch.tanh(a)) for n in WITHIN_ONE.split()),
    *(_after(n, lambda a: torch.abs(a) + 1.1) for n in ABOVE_ONE.split()),
    *(Case("elementwise", n, _overload(n), (r(3, 5), r(5))) for n in BINARY.split()),
    Case(
        "scatter",
        "scatter_reduce",
        _scatter_reduced,
        (r(5, 3), r(4, 3), Feed((4, 3), "int", 3)),
        terms=4,
    ),
]
"""Cases of operators that the conformance suite does not test."""
DEVICES = [info.id for info in infos()]


@functools.cache
def inputs_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(case.name))
    return [feed.make(generator) for feed in case.feeds]


@functools.cache
def graph_of(case: Case, backend: str) -> fx.GraphModule:
    """Trace with a backend's decompositions; without any for the backend "whole"."""
    table: Any = {} if backend == "whole" else get_backend(backend).decompositions()
    return trace(case.fn, inputs_of(case), table)


@functools.cache
def expected_of(case: Case) -> list[np.ndarray[Any, Any]]:
    wide = [t.double() if t.is_floating_point() else t for t in inputs_of(case)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        result = case.fn(*wide)
    finally:
        torch.set_default_dtype(before)
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [item.numpy() for item in found if item is not None]


def check(case: Case, found: list[np.ndarray[Any, Any]], graph: fx.GraphModule) -> None:
    nodes: Any = graph.graph.output_node().args[0]
    assert len(found) == len(expected_of(case)) == len(nodes)
    for i, (array, wide, node) in enumerate(zip(found, expected_of(case), nodes, strict=True)):
        meta = node.meta["val"]
        assert str(meta.dtype) == f"torch.{array.dtype.name}", f"output {i}"
        assert array.shape == tuple(meta.shape) == wide.shape, f"output {i}"
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(array, wide, err_msg=f"output {i}")
            continue
        eps = float(np.finfo(array.dtype).eps)
        finite = wide[np.isfinite(wide)]
        scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
        limit = case.tolerance * math.sqrt(case.terms) * eps * scale
        np.testing.assert_allclose(array, wide, rtol=0, atol=limit, err_msg=f"output {i}")


def refusal(device: Device, graph: fx.GraphModule) -> str | None:
    """Return the first operator that the device refuses, with the reason, or None."""
    found = ((operator_name(node), device.supports(node)) for node in graph_calls(graph))
    return next((f"{name}: {reason}" for name, reason in found if reason is not None), None)


def must_run(form: str, backend: str, case: Case) -> bool:
    """Return whether a refusal is an error: of any case on pytorch, of most on numpy."""
    if backend == "numpy":
        return form == "own" and case.name not in BEYOND_REFERENCE
    return backend == "pytorch"


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device_id", DEVICES)
@pytest.mark.parametrize("form", ["own", "whole"])
def test_operator(form: str, device_id: str, case: Case) -> None:
    device = opened(device_id)
    if case.large and device.info.capabilities.reference:
        pytest.skip("made to be right, not fast: small cases only")
    backend = device.info.backend
    graph = graph_of(case, backend if form == "own" else "whole")
    reason = refusal(device, graph)
    if reason is not None:
        assert not must_run(form, backend, case), reason
        pytest.skip(reason)
    assert (form, backend) != ("own", "numpy") or case.name not in BEYOND_REFERENCE
    check(case, run(device, graph, [t.numpy() for t in inputs_of(case)]), graph)


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.name)
def test_operators_only_the_reference_must_run(case: Case) -> None:
    graph = graph_of(case, "whole")
    check(case, run(opened("numpy:cpu:0"), graph, [t.numpy() for t in inputs_of(case)]), graph)


@pytest.mark.slow
def test_every_operator_of_the_reference_has_a_case() -> None:
    device = opened("numpy:cpu:0")
    cases = [*CASES, *REFERENCE_CASES]
    graphs = [graph_of(case, form) for case in cases for form in ("whole", "numpy")]
    ran = [graph for graph in graphs if refusal(device, graph) is None]
    met = {operator_name(node) for graph in ran for node in graph_calls(graph)}
    assert sorted(set(OPERATORS) - met) == []
