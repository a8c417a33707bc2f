"""The torch backend reuses memory only if no result can change, and orders its streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from found_devices import opened, run, trace
from hetpipe.backends.pytorch import PyTorchBackend, lanes, streams
from hetpipe.backends.pytorch.device import TorchBuffer
from hetpipe.backends.pytorch.program import Program
from random_graphs import random_function

from hetpipe.crew.launcher import usual_settings
from hetpipe.errors import BackendError

aten = torch.ops.aten
CPU = torch.device("cpu")


def program(fn: Any, inputs: list[torch.Tensor], donate: set[int]) -> Program:
    return Program(trace(fn, inputs, {}), frozenset(donate), CPU, "pytorch:cpu:0")


def pointers(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_too_large_an_upload_names_its_bytes() -> None:
    device, huge = opened("pytorch:cpu:0"), np.broadcast_to(np.float32(0), (1 << 48,))
    with pytest.raises(BackendError, match=f"pytorch:cpu:0: uploading {huge.nbytes} bytes failed"):
        device.upload(huge)


# --- reuse of memory ----------------------------------------------------------------------------


def sgd(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, lr: torch.Tensor) -> Any:
    m = torch.add(g * 0.5, m, alpha=0.9)
    return p - lr * m, m, torch.zeros_like(g)


def adam(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: torch.Tensor
) -> Any:
    zeroed = torch.zeros_like(g)  # before its last use, so it must be moved behind it
    m = torch.lerp(m, g, 0.1)
    v = torch.addcmul(v * 0.999, g, g, value=0.001)
    return p - lr * (m / (v.sqrt() + 1e-8)), m, v, zeroed


@pytest.mark.parametrize(("rule", "count"), [(sgd, 3), (adam, 4)])
def test_an_update_writes_into_its_donated_inputs(rule: Any, count: int) -> None:
    inputs = [torch.rand(4, 5) for _ in range(count)] + [torch.tensor(0.1)]
    expected = rule(*inputs)
    made = program(rule, inputs, set(range(count)))
    given = [tensor.clone() for tensor in inputs]
    with torch.inference_mode():
        results = made.call(given)
    assert sorted(pointers(results)) == sorted(pointers(given[:count]))
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_accumulator_is_added_to_in_place() -> None:
    def backward(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (acc + a.t() @ b,)

    inputs = [torch.randn(3, 4), torch.randn(5, 3), torch.randn(5, 4)]
    expected = backward(*inputs)[0]
    made = program(backward, inputs, {0})
    (result,) = made.call(inputs)
    assert result.data_ptr() == inputs[0].data_ptr()
    torch.testing.assert_close(result, expected)


GRAPHS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "read_again_later": (lambda a, b: ((a + b).relu() * a, a), [(3, 3), (3, 3)]),
    "view_read_later": (lambda a, b: (a.t() + b, (a * 2) + 1, a.t().exp()), [(3, 3), (3, 3)]),
    "two_views_out": (lambda a, b: (a.t(), a.view(9), a[0], b), [(3, 3), (3, 3)]),
    "same_twice": (lambda a, b: ((a + b) * (a + b), a * a), [(3, 3), (3, 3)]),
    "expanded": (lambda a, b: (a.expand(3, 3) + b, a.expand(3, 3) * 2), [(3, 1), (3, 3)]),
    "broadcast": (lambda a, b: (a + b, a.exp() + b.exp()), [(3, 1), (1, 3)]),
    "sliced": (lambda a, b: (a[:2] + b[1:], a[1:].exp(), b + 1), [(3, 3), (3, 3)]),
    "alias_of_result": (lambda a, b: ((a + b).t(), (a + b).exp()), [(3, 3), (3, 3)]),
    "transposed_chain": (lambda a, b: ((a.t() + b).reshape(9) * 2, b.t().exp()), [(3, 3), (3, 3)]),
    "other_dtype": (lambda a, b: ((a > b), (a > b).float() + a), [(3, 3), (3, 3)]),
    "residual": (
        lambda a, b: (F.relu(a @ b + a), (a @ b).sigmoid() - (a @ b)),
        [(3, 3), (3, 3)],
    ),
    "zeros_of_read": (lambda a, b: (torch.zeros_like(a), a + b, a * 2), [(3, 3), (3, 3)]),
    "full_of_read": (lambda a, b: (torch.full_like(a, 2.0) + b, a.exp()), [(3, 3), (3, 3)]),
    "split": (
        lambda a, b: (a.exp().split(1)[0] + 1, a.exp().split(1)[1] * b[:1]),
        [(3, 3), (3, 3)],
    ),
    "batch_norm": (
        lambda a, b: F.batch_norm(a, None, None, training=True).relu() + b,
        [(3, 3), (3, 3)],
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("donate", [(), (0,), (1,), (0, 1)])
def test_donation_changes_no_result(name: str, donate: tuple[int, ...]) -> None:
    fn, shapes = GRAPHS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    result = fn(*inputs)
    expected = [t.clone() for t in (result if isinstance(result, tuple) else (result,))]
    device = opened("pytorch:cpu:0")
    executable = device.compile(trace(fn, inputs, {}))
    buffers = [device.upload(t.numpy())[0] for t in inputs]
    outputs, _, _ = executable.run(buffers, frozenset(donate))
    tensors = []
    for buffer, wanted in zip(outputs, expected, strict=True):
        assert isinstance(buffer, TorchBuffer)
        assert buffer.tensor.is_contiguous()
        torch.testing.assert_close(buffer.tensor, wanted)
        tensors.append(buffer.tensor)
    kept = [b for i, b in enumerate(buffers) if i not in donate]
    for buffer, tensor in zip(
        kept, [t for i, t in enumerate(inputs) if i not in donate], strict=True
    ):
        assert isinstance(buffer, TorchBuffer)
        torch.testing.assert_close(buffer.tensor, tensor, rtol=0, atol=0)
    storages = {id(b): b.tensor.untyped_storage().data_ptr() for b in (*outputs, *kept)}  # type: ignore[attr-defined]  # TorchBuffer's own
    assert len(set(storages.values())) == len(storages), "two buffers share memory"


def test_random_elementwise_graphs_agree_for_every_donation() -> None:
    generator = np.random.default_rng(0)
    binary = [torch.add, torch.sub, torch.mul, torch.maximum]
    unary = [torch.relu, torch.tanh, torch.neg, torch.t, lambda t: t.reshape(-1).view(3, 3)]
    for _ in range(25):
        fn = random_function(generator, 12, binary, unary)
        inputs = [torch.randn(3, 3) for _ in range(3)]
        expected = fn(*inputs)
        graph = trace(fn, inputs, {})
        for size in range(4):
            for donate in itertools.combinations(range(3), size):
                arrays = [t.numpy() for t in inputs]
                found = run(opened("pytorch:cpu:0"), graph, arrays, frozenset(donate))
                for array, wanted in zip(found, expected, strict=True):
                    np.testing.assert_allclose(array, wanted.numpy(), rtol=1e-5, atol=1e-6)


# --- other parts of the contract ----------------------------------------------------------------


def test_a_failure_names_device_operator_and_layer() -> None:
    graph = trace(lambda a, i: a.exp()[i], [torch.zeros(3), torch.zeros(2, dtype=torch.int64)], {})
    for node in graph.graph.nodes:
        node.meta["layer"] = f"layer of {node.name}"
    device = opened("pytorch:cpu:0")
    with pytest.raises(
        BackendError, match=r"pytorch:cpu:0: aten.index.Tensor of layer layer of ind"
    ):
        run(device, graph, [np.zeros(3, np.float32), np.array([1, 9])])


def test_bfloat16_is_downloaded_as_bits() -> None:
    device = opened("pytorch:cpu:0")
    graph = trace(lambda a: a.to(torch.bfloat16), [torch.zeros(3)], {})
    (buffer,), _, _ = device.compile(graph).run([device.upload(np.float32([1, 2, 3]))[0]])
    assert (buffer.dtype, buffer.nbytes) == ("bfloat16", 6)
    bits = np.empty(3, np.uint16)
    device.download(buffer, bits)
    assert list(bits) == [0x3F80, 0x4000, 0x4040]


def test_fused_operators_are_kept() -> None:
    backend = PyTorchBackend()
    assert dict(backend.decompositions()) == {}


FAULTS = """
import resource, threading, torch
def work():
    for _ in range(20):
        kept = [torch.ones(nbytes // 4) for nbytes in (25 << 20, 25 << 20, 25 << 20)]
        del kept
def faults():
    thread = threading.Thread(target=work)  # computing is not the main thread's task in a worker
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(6)), torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's allocator")
def test_workers_have_their_threads_and_keep_freed_memory() -> None:
    def faults(settings: dict[str, str]) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS],
            env={**os.environ, "OMP_NUM_THREADS": "2", **settings},
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(word) for word in done.stdout.split()]

    found, threads = faults(usual_settings(1))
    usual, _ = faults({})
    assert threads == 1
    assert found < 100 < usual


# --- streams, on a simulated accelerator: work ends when the test says so -----------------------


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.happened = threading.Event()
        self.failure: str | None = None

    def record(self, stream: FakeStream) -> None:
        stream.put(self)

    def query(self) -> bool:
        if self.failure:
            raise RuntimeError(self.failure)
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(20)
        self.query()

    def elapsed_time(self, other: FakeEvent) -> float:
        return 5.0


class FakeStream:
    """A stream in which torch computes at once and only events wait for `release`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.pending: list[FakeEvent] = []
        self.waited: list[FakeEvent] = []
        self.held = False

    def put(self, event: FakeEvent) -> None:
        if self.held:
            self.pending.append(event)
        else:
            event.happened.set()

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self.release()

    def release(self, failure: str | None = None) -> None:
        for event in self.pending:
            event.failure = failure
            event.happened.set()
        self.pending = []


class FakeModule:
    Stream, Event = FakeStream, FakeEvent

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: FakeStream) -> Iterator[None]:
        yield


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[streams.StreamDevice]:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(
        streams.StreamDevice,
        "pinned",
        lambda self, shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype)),
    )
    device = streams.StreamDevice(opened("pytorch:cpu:0").info, CPU, FakeModule())
    yield device
    device.close()


A = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_run_follows_its_upload_on_the_device(accelerator: streams.StreamDevice) -> None:
    executable = accelerator.compile(trace(lambda a: a * 2, [torch.zeros(2, 3)], {}))
    accelerator.incoming.stream.held = accelerator.compute.stream.held = True
    buffer, uploaded = accelerator.upload(A)
    assert isinstance(uploaded, lanes.StreamEvent)
    outputs, ran, _ = executable.run([buffer], after=[uploaded])
    assert accelerator.compute.stream.waited == [uploaded.native]
    assert not uploaded.done()
    assert not ran.done()
    with pytest.raises(BackendError, match=r"not done after 0.01 s"):
        ran.wait(0.01)
    accelerator.incoming.stream.release()
    accelerator.compute.stream.release()
    ran.wait(20)
    result = np.zeros_like(A)
    accelerator.download(outputs[0], result).wait(20)
    np.testing.assert_array_equal(result, A * 2)


def test_a_download_ends_when_the_host_has_it(accelerator: streams.StreamDevice) -> None:
    buffer, _ = accelerator.upload(A)
    accelerator.outgoing.stream.held = True
    result = np.zeros_like(A)
    event = accelerator.download(buffer, result)
    assert not event.done()
    assert not result.any()
    with pytest.raises(BackendError, match="not done"):
        event.wait(0.01)
    accelerator.outgoing.stream.release()
    event.wait(20)
    np.testing.assert_array_equal(result, A)


def test_a_device_error_is_raised_by_later_waits(accelerator: streams.StreamDevice) -> None:
    executable = accelerator.compile(trace(lambda a: a * 2, [torch.zeros(2, 3)], {}))
    buffer, _ = accelerator.upload(A)
    accelerator.compute.stream.held = accelerator.outgoing.stream.held = True
    outputs, ran, _ = executable.run([buffer])
    result = np.zeros_like(A)
    event = accelerator.download(outputs[0], result)
    accelerator.compute.stream.release("illegal access")
    accelerator.outgoing.stream.release("illegal access")
    for broken in (ran, event):
        with pytest.raises(BackendError, match="illegal access"):
            broken.wait(20)
    assert not result.any()


@pytest.mark.slow
def test_hetpipes_operators_import_no_torch_compiler() -> None:
    """Importing the compiler takes a second, for which the first step would wait."""
    code = """
import operator
import sys
import torch
from hetpipe.backends.pytorch.program import Program
from hetpipe.sdk.operators.attention import attention

graph = torch.fx.Graph()
query = graph.placeholder("query")
query.meta["val"] = torch.empty(1, 2, 3, 4)
both = graph.call_function(torch.ops.hetpipe.attention.default, (query, query, query, True, 0.5))
both.meta["val"] = (torch.empty(1, 2, 3, 4), torch.empty(1, 2, 3))
first = graph.call_function(operator.getitem, (both, 0))
first.meta["val"] = both.meta["val"][0]
graph.output((first,))
module = torch.fx.GraphModule({}, graph)
program = Program(module, frozenset(), torch.device("cpu"), "here")
values = torch.randn(1, 2, 3, 4)
(result,) = program.call([values])
loaded = sorted({"torch._dynamo", "sympy"} & set(sys.modules))
assert torch.equal(result, attention(values, values, values, True, 0.5)[0])
sys.exit(", ".join(loaded) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
