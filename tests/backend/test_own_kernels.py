"""Kernels and operators registered on a subclass run there; stock backends keep their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import Array, execute, fetch, run, trace
from hetpipe.backends.opencl import OpenCLBackend, Pack
from hetpipe.backends.pytorch import PyTorchBackend

from hetpipe.conformance.check import Level
from hetpipe.conformance.run import checks_of, rig_of, run_check
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Device
from hetpipe.sdk.graph import graph_calls, graph_inputs, operator_name
from hetpipe.sdk.host import registry

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
SCALED = """
__kernel void scaled(__global const float *x, __global float *y, int count, float factor)
{
    const int i = get_global_id(0);
    if (i < count) y[i] = factor * x[i];
}
"""


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))


def blocks() -> list[dict[str, Any]]:
    """Run the code blocks of the page and return the names that each defines."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    results = []
    for code in codes:
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(code, str(PAGE), "exec"), names)
        results.append(names)
    return results


def subclass(**settings: Any) -> type[OpenCLBackend]:
    """Register a backend whose relu multiplies by three, which no stock kernel does."""
    backend = type("Tripled", (OpenCLBackend,), {"name": "tripled"})
    registry.register_backend(backend)
    fields: dict[str, Any] = {
        "arguments": lambda call: {
            "x": call.inputs[0], "y": call.outputs[0], "count": call.outputs[0].numel,
            "factor": 3.0,
        },
        "global_size": lambda call: (call.outputs[0].numel,),
    }  # fmt: skip
    backend.register_kernel("aten.relu.default", SCALED, "scaled", **{**fields, **settings})
    return backend


def pocl(name: str) -> str:
    ids = [info.id for info in registry.devices_of(name)]
    for device_id in ids:
        if device_id.startswith(f"{name}:pocl:"):
            return device_id
    pytest.skip("PoCL is not here")


def result(device: Device, fn: Callable[..., Any], *inputs: torch.Tensor) -> Array:
    graph = trace(fn, inputs, registry.decompositions_of(device.info.backend))
    (array,) = run(device, graph, [tensor.numpy() for tensor in inputs])
    return array


def test_the_kernel_runs_only_in_the_subclass() -> None:
    subclass()
    own, stock = (registry.open_device(pocl(name)) for name in ("tripled", "opencl"))
    assert own.info.backend == "tripled"
    for _ in range(2):
        np.testing.assert_array_equal(result(own, torch.relu, X), 3 * X.numpy())
        np.testing.assert_array_equal(result(stock, torch.relu, X), X.relu().numpy())
    np.testing.assert_allclose(
        result(own, lambda x: torch.relu(x + 1.0) * 2.0, X), 6 * (X + 1.0).numpy(), rtol=1e-6
    )


def test_a_kernel_runs_only_for_calls_it_applies_to() -> None:
    subclass(applies=lambda call: None if call.outputs[0].numel > 10 else "too small")
    device = registry.open_device(pocl("tripled"))
    np.testing.assert_array_equal(result(device, torch.relu, X), 3 * X.numpy())
    small = X[0].clone()
    np.testing.assert_array_equal(result(device, torch.relu, small), small.relu().numpy())


def test_an_operator_without_a_stock_kernel() -> None:
    backend = subclass()
    backend.register_kernel(
        "aten.erfinv.default", SCALED, "scaled",
        arguments=lambda call: {
            "x": call.inputs[0], "y": call.outputs[0], "count": 35, "factor": 2.0
        },
        global_size=lambda call: (35,),
        applies=lambda call: None if call.outputs[0].numel == 35 else "it needs 35 elements",
    )  # fmt: skip
    device = registry.open_device(pocl("tripled"))
    np.testing.assert_array_equal(result(device, torch.erfinv, X), 2 * X.numpy())
    node = next(iter(graph_calls(trace(torch.erfinv, [X[0].clone()], {}))))
    assert device.supports(node) == "kernel scaled does not take it: it needs 35 elements"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"arguments": lambda call: {"x": call.inputs[0]}}, "argument 'y': the source declares"),
        (
            {"arguments": lambda call: {"x": call.inputs[7]}},
            "kernel scaled for aten.relu.default: IndexError",
        ),
    ],
)
def test_wrong_arguments_are_reported(settings: dict[str, Any], problem: str) -> None:
    subclass(**settings)
    device = registry.open_device(pocl("tripled"))
    with pytest.raises(BackendError, match=problem):
        result(device, torch.relu, X)


def test_a_source_that_does_not_compile_is_reported() -> None:
    backend = subclass()
    backend.register_kernel(
        "aten.exp.default", SCALED.replace("factor * x[i]", "factor * nothing"), "scaled",
        arguments=backend.kernels[0].arguments, global_size=backend.kernels[0].global_size,
    )  # fmt: skip
    device = registry.open_device(pocl("tripled"))
    with pytest.raises(BackendError, match="nothing"):
        result(device, torch.exp, X)
    np.testing.assert_array_equal(result(device, torch.relu, X), 3 * X.numpy())


PRODUCT = """
__kernel void flip(__global const float *w, __global float *t, int rows, int columns)
{
    const int i = get_global_id(0);
    t[(i % columns) * rows + i / columns] = w[i];
}
__kernel void product(__global const float *x, __global const float *t, __global float *y,
                      int depth, int columns)
{
    const int row = get_global_id(0), column = get_global_id(1);
    float sum = 0;
    for (int k = 0; k < depth; ++k)
        sum += x[row * depth + k] * t[column * depth + k];
    y[row * columns + column] = sum;
}
"""


def with_product(**settings: Any) -> Device:
    fields: dict[str, Any] = {
        "source": PRODUCT,
        "packs": {"t": Pack(
            input=1, function="flip", shape=lambda call: call.inputs[1].shape[::-1],
            arguments=lambda call: {
                "w": call.inputs[1], "t": call.packed["t"], "rows": call.inputs[1].shape[0],
                "columns": call.inputs[1].shape[1],
            },
            global_size=lambda call: (call.inputs[1].numel,),
        )},
        "arguments": lambda call: {
            "x": call.inputs[0], "t": call.packed["t"], "y": call.outputs[0],
            "depth": call.inputs[0].shape[1], "columns": call.outputs[0].shape[1],
        },
        "global_size": lambda call: call.outputs[0].shape,
    }  # fmt: skip
    backend = subclass()
    backend.register_kernel("aten.mm.default", function="product", **{**fields, **settings})
    return registry.open_device(pocl("tripled"))


def test_a_product_with_packed_weights_is_right() -> None:
    device = with_product()
    weight = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    exact = X.double() @ weight.double()
    np.testing.assert_allclose(result(device, torch.mm, X, weight), exact, rtol=1e-5, atol=1e-5)
    fused = result(device, lambda x, w: torch.mm(x, w) * 2.0 + 1.0, X, weight)
    np.testing.assert_allclose(fused, 2 * exact + 1, rtol=1e-5, atol=1e-5)


def test_a_weight_is_packed_once_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed weight is kept from the second run with the same weight on."""
    device: Any = with_product()
    first, second = torch.ones(7, 4), torch.full((7, 4), 2.0)
    graph = trace(torch.mm, [X, first], registry.decompositions_of("tripled"))
    graph_inputs(graph)[1].meta["steady"] = True
    executable = device.compile(graph)
    launched: list[int] = []
    enqueue = executable._enqueue

    def counted(steps: Any, waits: Any) -> Any:
        launched.append(len(steps))
        return enqueue(steps, waits)

    monkeypatch.setattr(executable, "_enqueue", counted)
    x, *weights = (device.upload(each.numpy())[0] for each in (X, first, second))
    turns = [(0, first)] * 3 + [(1, second)] * 2 + [(0, first)] * 2
    for index, weight in turns:
        (output,), event, _ = executable.run([x, weights[index]])
        array = fetch(device, output, [event])
        np.testing.assert_allclose(array, (X @ weight).numpy(), rtol=1e-4, atol=1e-5)
    assert launched == [2, 2, 1, 2, 1, 2, 1]


STORING = """
__kernel void product(__global const float *x, __global const float *w, int depth, int columns,
                      RESULTS)
{
    const int row = get_global_id(0), i = get_global_id(1);
    float sum = 0;
    for (int k = 0; k < depth; ++k)
        sum += x[row * depth + k] * w[k * columns + i];
    STORE(row * columns + i, sum);
}
"""


def with_epilogue() -> Device:
    backend = type("Tripled", (OpenCLBackend,), {"name": "tripled"})
    registry.register_backend(backend)
    backend.register_kernel(
        "aten.mm.default", STORING, "product",
        epilogue=True,
        arguments=lambda call: {
            "x": call.inputs[0], "w": call.inputs[1], "depth": call.inputs[0].shape[1],
            "columns": call.outputs[0].shape[1],
        },
        global_size=lambda call: call.outputs[0].shape,
    )  # fmt: skip
    return registry.open_device(pocl("tripled"))


Function = Callable[..., Any]
EPILOGUES: dict[str, tuple[Function, int]] = {
    "none": (lambda p, b, r: p, 1),
    "bias": (lambda p, b, r: p + b, 1),
    "bias and relu": (lambda p, b, r: torch.relu(p + b), 1),
    "a function of ours": (lambda p, b, r: torch.nn.functional.gelu(p + b), 1),
    "a residual in its order": (lambda p, b, r: (p * 2.0 + r).sigmoid(), 1),
    "product and result": (lambda p, b, r: (p, torch.relu(p)), 1),
    "two results": (lambda p, b, r: (p + b, p - r), 1),
    "another shape": (lambda p, b, r: torch.exp(p.reshape(5, 2, 2) + 1.0), 1),
    "integers": (lambda p, b, r: (p > 0.0).to(torch.int64), 1),
    "its transpose": (lambda p, b, r: torch.exp(p.t()), 2),
    "a row of its own": (lambda p, b, r: p - p.sum(1, keepdim=True), 3),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_following_operators_run_in_the_kernels_store(name: str) -> None:
    device: Any = with_epilogue()
    function, launches = EPILOGUES[name]
    random = torch.Generator().manual_seed(2)
    inputs = [X, *(torch.randn(size, generator=random) for size in ((7, 4), (4,), (5, 4)))]

    def whole(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        return function(torch.mm(x, w), b, r)

    executable: Any = device.compile(trace(whole, inputs, registry.decompositions_of("tripled")))
    assert len(executable._lowered.launches) == launches
    outputs = execute(device, executable, [each.numpy() for each in inputs])
    exact = whole(*(each.double() for each in inputs))
    for array, right in zip(outputs, exact if isinstance(exact, tuple) else [exact], strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5)


def test_an_epilogue_after_packed_weights() -> None:
    source = PRODUCT.replace("__global float *y,\n", "").replace(
        "int depth, int columns)", "int depth, int columns, RESULTS)"
    )
    source = source.replace(
        "y[row * columns + column] = sum;", "STORE(row * columns + column, sum);"
    )
    device = with_product(
        source=source,
        epilogue=True,
        arguments=lambda call: {
            "x": call.inputs[0], "t": call.packed["t"], "depth": call.inputs[0].shape[1],
            "columns": call.outputs[0].shape[1],
        },
    )  # fmt: skip
    weight = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    fused = result(device, lambda x, w: torch.mm(x, w) * 2.0 + 1.0, X, weight)
    exact = 2 * (X.double() @ weight.double()) + 1
    np.testing.assert_allclose(fused, exact, rtol=1e-5, atol=1e-5)


def test_an_epilogue_with_empty_tensors() -> None:
    device = with_epilogue()
    nothing = torch.empty(0, 7)
    assert result(device, lambda x, w: torch.mm(x, w) + 1.0, nothing, X.t()).shape == (0, 5)


def test_the_stock_class_accepts_no_kernels() -> None:
    with pytest.raises(BackendError, match="works only on a subclass"):
        OpenCLBackend.register_kernel("aten.relu.default", SCALED, "scaled")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    backend = type("Mine", (OpenCLBackend,), {"name": "mine"})
    with pytest.raises(BackendError, match=r"my\.cl: cannot be read: No such file"):
        backend.register_kernel("aten.relu.default", tmp_path / "my.cl", "my")


@pytest.mark.slow
def test_the_page_runs_and_is_right() -> None:
    opencl, torch_ = blocks()
    kinds: list[type[Backend]] = [opencl["MyOpenCL"], torch_["MyTorch"]]
    ids = [pocl(kinds[0].name), "my-torch:cpu:0"]
    names = ("operators/gelu_backward", "operators/activations", "strides/transposed")
    checks = [each for each in checks_of(Level.TRAINING) if each.name in names]
    assert len(checks) >= 2
    for device_id in ids:
        rig = rig_of(device_id)
        graph = trace(torch.nn.functional.gelu, [X], rig.table)
        assert "aten.gelu.default" in [operator_name(node) for node in graph_calls(graph)]
        for each in checks:
            outcome = run_check(each, rig)
            assert outcome.outcome == "passed", outcome


def test_an_operator_of_torchs_subclass_runs() -> None:
    operators = {"aten.relu.default": lambda x: x, "aten.mul.Tensor": lambda a, b: a * b * 2}
    fields = {"name": "odd", "operators": operators}
    registry.register_backend(type("Odd", (PyTorchBackend,), fields))
    device = registry.open_device("odd:cpu:0")
    np.testing.assert_array_equal(result(device, torch.relu, X), X.numpy())
    np.testing.assert_array_equal(result(device, lambda x: x * x, X), (2 * X * X).numpy())
    stock = registry.open_device("pytorch:cpu:0")
    np.testing.assert_array_equal(result(stock, torch.relu, X), X.relu().numpy())


MODULES = (
    "device", "lower.builder", "lower.lowering", "lower.target", "ops.matmul", "user.user_kernels",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_first(module: str) -> None:
    """A circular import is visible only if the import begins at one of its modules."""
    code = f"import hetpipe.backends.opencl.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
