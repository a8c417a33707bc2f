"""Kernel arguments are passed by name and checked against the declaration in the source."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import product
from typing import Any

import pytest
import torch
from found_devices import infos, opened, trace
from hetpipe.backends.opencl.lower.expr import Value
from hetpipe.backends.opencl.lower.launch import Kernel, kernel_source
from hetpipe.backends.opencl.lower.lowering import lower
from hetpipe.backends.opencl.lower.signature import bind, parameters

from hetpipe.conformance.cases import CASES
from hetpipe.errors import BackendError
from hetpipe.sdk.graph import graph_calls
from hetpipe.sdk.host.registry import get_backend

SOURCE = """
#define PAIR(x, n) __global const float *restrict x, const int x##_##n
#ifdef BYTES
#define TYPE uchar // one per element
#else
#define TYPE float
#endif
__kernel void k(PAIR(a, row), __global TYPE *out, const float scale) { out[0] = a[0] * scale; }
"""
A, OUT = Value(1, (4,), "float32"), Value(2, (4,), "float32")
ARGUMENTS: dict[str, Any] = {"a": A, "a_row": 3, "out": OUT, "scale": 0.5}


def test_a_tensor_of_whole_vectors_may_be_declared_as_vectors() -> None:
    source = "__kernel void k(__global const float4 *a, __global uchar16 *b) { b[0] = (uchar16)1; }"
    for count, fits in ((8, True), (4, True), (6, False)):
        given = {"a": Value(1, (count,), "float32"), "b": Value(2, (2, 16), "uint8")}
        if fits:
            assert bind(Kernel(source, "k"), given) == tuple(given.values())
        else:
            with pytest.raises(BackendError, match=r"declares float4 \*a, the launch gives a tens"):
                bind(Kernel(source, "k"), given)
    gap = Kernel(source.replace("float4", "float3"), "k")
    with pytest.raises(BackendError, match=r"float3 \*a"):
        bind(gap, {"a": Value(1, (6,), "float32"), "b": Value(2, (16,), "uint8")})


def test_arguments_come_in_the_order_of_the_declaration() -> None:
    mixed = dict(reversed(ARGUMENTS.items()))
    assert bind(Kernel(SOURCE, "k"), mixed) == (A, 3, OUT, 0.5)


def test_declarations_follow_macros_and_options() -> None:
    declared = [str(parameter) for parameter in parameters(Kernel(SOURCE, "k", ("-DBYTES",)))]
    assert declared == ["float *a", "int a_row", "uchar *out", "float scale"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "argument 'scale': the source declares float scale, the launch gives "
                          "none of that name"),
        ({"rows": 3}, "argument 'rows': the source declares none of that name, the launch gives "
                      "the int 3"),
        ({"a_row": 3.0}, "argument 'a_row': the source declares int a_row, the launch gives the "
                         "float 3.0"),
        ({"scale": 2}, "argument 'scale': the source declares float scale, the launch gives the "
                       "int 2"),
        ({"out": Value(3, (4,), "int64")}, "argument 'out': the source declares float *out, the "
                                           "launch gives a tensor of int64"),
        ({"a_row": A}, "argument 'a_row': the source declares int a_row, the launch gives a "
                       "tensor of float32"),
        ({"a": 1}, "argument 'a': the source declares float *a, the launch gives the int 1"),
    ],
)  # fmt: skip
def test_a_mismatch_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = {k: v for k, v in (ARGUMENTS | change).items() if v is not None}
    with pytest.raises(BackendError, match=re.escape(f"kernel k, {message}")):
        bind(Kernel(SOURCE, "k"), arguments)


def test_a_kernel_missing_in_the_source_is_refused() -> None:
    with pytest.raises(BackendError, match="the source of kernel other does not declare it"):
        parameters(Kernel(SOURCE, "other"))


def kernels_of_files() -> set[str]:
    """Return the names of all kernels in `hetpipe.kernels`."""
    root = files("hetpipe.kernels")
    texts = [f.read_text() for d in (root, root.joinpath("cpu")) for f in d.iterdir()
             if f.name.endswith(".cl")]  # fmt: skip
    return {name for text in texts for name in re.findall(r"__kernel void (\w+)", text)}


def batch_norm_backward(dy: torch.Tensor, x: torch.Tensor, c: torch.Tensor) -> Any:
    backward = torch.ops.aten.native_batch_norm_backward
    return backward(dy, x, c, c, c, c, c, True, 1e-5, [True] * 3)


def convolutions(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, large: torch.Tensor, v: torch.Tensor
) -> Any:
    """Convolve a small image, with gradients, and many tiles by minimal filtering."""
    settings = ([1, 2], [1, 1], [1, 1], False, [0, 0], 1)
    gradients = torch.ops.aten.convolution_backward(dy, x, w, None, *settings, [True, True, False])
    small = torch.ops.aten.convolution(x, w, None, *settings)
    return small, *gradients[:2], torch.conv2d(large, v, padding=1)


@pytest.mark.slow
def test_every_kernel_is_launched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering all operator cases binds the arguments of every kernel that the files declare."""
    bound: set[str] = set()

    def noted(kernel: Kernel) -> Any:
        bound.add(kernel.name)
        return parameters(kernel)

    monkeypatch.setattr("hetpipe.backends.opencl.lower.signature.parameters", noted)
    device: Any = opened(next(i.id for i in infos() if i.backend == "opencl"))
    generator = torch.Generator().manual_seed(0)
    own = get_backend("opencl").decompositions()
    images, channels = torch.randn(2, 3, 4, 4), torch.rand(3)
    functions = [(case.fn, [feed.make(generator) for feed in case.feeds]) for case in CASES]
    functions.append((batch_norm_backward, [images, images, channels]))
    shapes = ((2, 26, 2, 2), (2, 64, 2, 3), (26, 64, 3, 3), (2, 16, 64, 64), (40, 16, 3, 3))
    functions.append((convolutions, [torch.zeros(shape) for shape in shapes]))
    for (fn, inputs), table in product(functions, ({}, own)):
        graph = trace(fn, inputs, table)
        if all(device.supports(node) is None for node in graph_calls(graph)):
            lower(graph, device.target)
    # The kernels of ceiling.cl measure the device, outside any graph.
    assert kernels_of_files() - {"fma_ceiling", "nothing"} - bound == set()
    assert [p.name for p in parameters(_ceiling())] == ["out", "repeats"]


def _ceiling() -> Kernel:
    return Kernel(kernel_source("cpu/common.cl") + kernel_source("cpu/ceiling.cl"), "fma_ceiling")
