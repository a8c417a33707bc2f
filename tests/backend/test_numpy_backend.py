"""The reference runs without torch and names the operator that failed."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import execute, fetch, opened, put, run, trace
from hetpipe.backends.numpy.functions import philox
from hetpipe.backends.numpy.operators import OPERATORS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import get_backend

DECOMPOSITIONS = get_backend("numpy").decompositions()


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the reference called {func}")


class NoFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the reference called {func}")


def loss_and_gradients(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
    with torch.enable_grad():
        hidden = torch.nn.functional.conv2d(x, w, padding=1).relu().flatten(1)
        loss = (hidden @ v).logsumexp(1).mean()
        return (loss.detach(), *torch.autograd.grad(loss, [w, v]))


def test_running_calls_no_torch_operator() -> None:
    inputs = [torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(80, 4)]
    expected = loss_and_gradients(*inputs)
    device = opened("numpy:cpu:0")
    executable = device.compile(trace(loss_and_gradients, inputs, DECOMPOSITIONS))
    arrays = [tensor.numpy() for tensor in inputs]
    with NoFunctions(), NoOperators():
        with pytest.raises(AssertionError, match="the reference called"):
            torch.zeros(1)
        results = execute(device, executable, arrays)
    for found, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_philox_known_answers() -> None:
    """The expected values are Random123's kat_vectors for philox4x32 with 10 rounds."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, expected in (
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox(np.array(counter, np.uint64), key)
        assert struct.pack("4I", *map(int, words)) == struct.pack("4I", *expected)


def test_a_failure_names_device_operator_and_layer() -> None:
    graph = trace(lambda a, i: a[i], [torch.zeros(3), torch.zeros(2, dtype=torch.int64)], {})
    for node in graph.graph.nodes:
        node.meta["layer"] = "lookup"
    device = opened("numpy:cpu:0")
    with pytest.raises(BackendError, match=r"numpy:cpu:0: aten.index.Tensor of layer lookup"):
        run(device, graph, [np.zeros(3, np.float32), np.array([1, 9])])


def test_dtypes_numpy_lacks_are_refused() -> None:
    graph = trace(lambda a: a.to(torch.bfloat16).float(), [torch.zeros(3)], {})
    call = next(node for node in graph.graph.nodes if node.op == "call_function")
    assert opened("numpy:cpu:0").supports(call) == "numpy has no bfloat16"


def test_two_runs_agree_bit_for_bit() -> None:
    inputs = [torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(80, 4)]
    device = opened("numpy:cpu:0")
    executable = device.compile(trace(loss_and_gradients, inputs, DECOMPOSITIONS))
    buffers = [put(device, tensor.numpy()) for tensor in inputs]
    first, second = executable.run(buffers)[0], executable.run(buffers)[0]
    for a, b in zip(first, second, strict=True):
        assert fetch(device, a).tobytes() == fetch(device, b).tobytes()


def test_strides_count_the_elements_of_a_broadcast_view() -> None:
    repeated = np.broadcast_to(np.float32(2.0), (6,))
    read = OPERATORS["aten.as_strided.default"](repeated, (2, 3), (3, 1))
    np.testing.assert_array_equal(read, np.full((2, 3), 2.0, np.float32))


@pytest.mark.parametrize("how", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int32])
def test_an_extreme_without_the_own_value_is_right(how: str, dtype: torch.dtype) -> None:
    """A place's extreme may be infinite, or True or False."""
    infinite = torch.tensor([-np.inf, np.inf, 1.0])
    source = infinite if dtype == torch.float32 else torch.tensor([0, 1, 1]).to(dtype)
    x, index = torch.ones(3).to(dtype), torch.tensor([0, 2, 2])
    expected = x.scatter_reduce(0, index, source, how, include_self=False)
    reduce = OPERATORS["aten.scatter_reduce.two"]
    found = reduce(x.numpy(), 0, index.numpy(), source.numpy(), how, include_self=False)
    np.testing.assert_array_equal(found, expected.numpy())
