"""Every operator, on every device found here, against torch in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case
from found_devices import infos, opened, run, trace
from hetpipe.backends.numpy.operators import OPERATORS
from torch import fx

from hetpipe.sdk.graph import graph_calls, operator_name
from hetpipe.sdk.registry import get_backend

COMPLETE = ("numpy", "pytorch")  # must run every case, where others may refuse an operator
DEVICES = [info.id for info in infos()]


@functools.cache
def inputs_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(case.name))
    return [feed.make(generator) for feed in case.feeds]


@functools.cache
def graph_of(case: Case, backend: str) -> fx.GraphModule:
    """For a backend's own table of decompositions; none at all for the backend "whole"."""
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device_id", DEVICES)
@pytest.mark.parametrize("form", ["own", "whole"])
def test_operator(form: str, device_id: str, case: Case) -> None:
    device = opened(device_id)
    if case.large and device.info.capabilities.reference:
        pytest.skip("made to be right, not fast: small cases only")
    backend = device.info.backend
    graph = graph_of(case, backend if form == "own" else "whole")
    for node in graph_calls(graph):
        reason = device.supports(node)
        if reason is not None:
            must = backend in COMPLETE and (form == "own" or backend == "pytorch")
            assert not must, f"{operator_name(node)}: {reason}"
            pytest.skip(f"{operator_name(node)}: {reason}")
    check(case, run(device, graph, [t.numpy() for t in inputs_of(case)]), graph)


def test_every_operator_of_the_reference_has_a_case() -> None:
    met = {
        operator_name(node)
        for case in CASES
        for backend in ("whole", "numpy")
        for node in graph_calls(graph_of(case, backend))
    }
    assert sorted(set(OPERATORS) - met) == []
