"""The contract: graphs can be sent, backends are found, devices keep their promises."""

from __future__ import annotations

import pickle
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import fetch, infos, opened, put, run, trace
from hetpipe.backends.numpy import NumpyBackend, NumpyDevice

from hetpipe.capture.program import Program, Slot
from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.backend import DoneEvent
from hetpipe.sdk.graph import dump_graph, load_graph
from hetpipe.sdk.host import references, registry
from hetpipe.sdk.info import API_VERSION, DeviceInfo

aten = torch.ops.aten
A = np.arange(6, dtype=np.float32).reshape(2, 3)
FAST = [info.id for info in infos() if not info.capabilities.emulated]


def graph_of(fn: Any, *shapes: tuple[int, ...]) -> Any:
    return trace(fn, [torch.zeros(shape) for shape in shapes], {})


# --- graphs can be sent -------------------------------------------------------------------------


def sample(a: torch.Tensor, b: torch.Tensor) -> Any:
    values, indices = (a * float("inf")).where(a > 0, b).max(1)
    return values.to(torch.float64), indices, torch.full((2,), 3, dtype=torch.int32), a[:, 1:3]


def test_a_graph_survives_a_round_trip_through_bytes() -> None:
    graph = graph_of(sample, (2, 3), (2, 3))
    again = load_graph(dump_graph(graph))
    assert [n.format_node() for n in again.graph.nodes] == [
        n.format_node() for n in graph.graph.nodes
    ]
    for old, new in zip(graph.graph.nodes, again.graph.nodes, strict=True):
        assert str(old.meta["val"]) == str(new.meta["val"])
        assert old.meta.get("layer") == new.meta.get("layer")
    inputs = [A - 2, A]
    for x, y in zip(
        run(opened("numpy:cpu:0"), graph, inputs),
        run(opened("numpy:cpu:0"), again, inputs),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_a_graph_that_reads_attributes_cannot_be_sent() -> None:
    graph = graph_of(lambda a: a + 1, (2, 3))
    graph.register_buffer("constant", torch.zeros(3))
    with graph.graph.inserting_before(graph.graph.output_node()):
        graph.graph.get_attr("constant")
    with pytest.raises(BackendError, match="reads the attribute constant"):
        dump_graph(graph)


def test_a_program_pickles() -> None:
    slot = Slot("input", "x", (2, 3), "float32")
    program = Program(graph_of(lambda a: a + 1, (2, 3)), (slot,), (slot,))
    again = pickle.loads(pickle.dumps(program))
    assert (again.inputs, again.outputs) == (program.inputs, program.outputs)
    (result,) = run(opened("numpy:cpu:0"), again.graph, [A])
    np.testing.assert_array_equal(result, A + 1)


# --- backends are found -------------------------------------------------------------------------


class Toy(NumpyBackend):
    name = "toy"

    def discover(self) -> list[DeviceInfo]:
        return [
            DeviceInfo(
                id="toy:cpu:0", backend="toy", kind="cpu", name="toy", vendor="tests", driver="1",
                memory_nbytes=1 << 20, memory_domain="host",
            )
        ]  # fmt: skip


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


@pytest.mark.usefixtures("registered")
def test_a_backend_registered_at_run_time_is_found_and_runs() -> None:
    assert registry.register_backend(Toy) is Toy
    assert registry.register_backend(Toy) is Toy, "registering twice is no error"
    assert "toy" in registry.backend_names()
    devices, failures = registry.discover_devices(["toy"])
    assert [info.id for info in devices] == ["toy:cpu:0"]
    assert failures == {}
    device = registry.open_device("toy:cpu:0")
    (result,) = run(device, graph_of(lambda a: a * 2, (2, 3)), [A])
    np.testing.assert_array_equal(result, A * 2)
    assert references.backend_reference("toy") == f"{__name__}:Toy"


@pytest.mark.usefixtures("registered")
def test_a_local_class_cannot_be_loaded_by_another_process() -> None:
    class Local(Toy):
        name = "local"

    registry.register_backend(Local)
    assert references.backend_reference("local") is None


@pytest.mark.usefixtures("registered")
def test_two_classes_may_not_share_a_name() -> None:
    registry.register_backend(Toy)
    other = type("Other", (Toy,), {})
    with pytest.raises(BackendError, match=r"'toy' is already .*Toy; give .*Other another name"):
        registry.register_backend(other)


@pytest.mark.usefixtures("registered")
def test_the_error_for_an_unknown_name_lists_known_names() -> None:
    with pytest.raises(BackendError, match=r"no backend 'nvdia'; .*known: .*numpy"):
        registry.get_backend("nvdia")
    with pytest.raises(BackendError, match=r"no device 'numpy:cpu:7'; .*known: numpy:cpu:0"):
        registry.open_device("numpy:cpu:7")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("value", "reason"),
    [("no.such.module:X", "cannot be loaded"), ("pathlib:Path", "not a Backend class")],
)
def test_a_broken_entry_point_disables_only_its_backend(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    points = [point("broken", value), point("numpy", "hetpipe.backends.numpy:NumpyBackend")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    devices, failures = registry.discover_devices()
    assert [info.id for info in devices] == ["numpy:cpu:0"]
    assert list(failures) == ["broken"]
    assert reason in failures["broken"]


@pytest.mark.usefixtures("registered")
def test_a_backend_of_another_contract_version_is_refused() -> None:
    with pytest.raises(BackendError, match=rf"version 99 .* runs versions 1 to {API_VERSION}"):
        registry.register_backend(type("Old", (Toy,), {"api_version": 99}))


# --- devices keep their promises ----------------------------------------------------------------


@pytest.mark.parametrize("device_id", FAST)
def test_an_output_that_is_a_placeholder_is_the_same_buffer(device_id: str) -> None:
    device = opened(device_id)
    executable = device.compile(graph_of(lambda a, b: (b, a + b, a), (2, 3), (2, 3)))
    a, b = put(device, A), put(device, A * 2)
    outputs, event, _ = executable.run([a, b])
    event.wait(60)
    assert outputs[0] is b
    assert outputs[2] is a
    np.testing.assert_array_equal(fetch(device, outputs[1]), A * 3)


@pytest.mark.parametrize("device_id", FAST)
def test_outputs_share_no_memory_with_inputs_that_were_not_donated(device_id: str) -> None:
    device = opened(device_id)
    graph = graph_of(lambda a: (aten.t(a), aten.view(a, [6]), aten.slice(a, 0, 0, 1)), (2, 3))
    for node in graph.graph.nodes:
        reason = device.supports(node) if node.op == "call_function" else None
        if reason is not None:
            pytest.skip(reason)
    a = put(device, A)
    outputs, event, _ = device.compile(graph).run([a])
    event.wait(60)
    taking = device.compile(graph_of(lambda a: a * 0, (2, 3)))
    taking.run([a], frozenset({0}))[1].wait(60)  # may overwrite the memory of `a`
    for found, expected in zip(outputs, (A.T, A.reshape(6), A[:1]), strict=True):
        np.testing.assert_array_equal(fetch(device, found), expected)


@pytest.mark.parametrize("device_id", FAST)
def test_inputs_keep_their_values_unless_donated(device_id: str) -> None:
    device = opened(device_id)
    graph = graph_of(lambda a, b: ((a + b) * b - a, a * b), (2, 3), (2, 3))
    executable = device.compile(graph)
    expected = ((A + 2 * A) * 2 * A - A, 2 * A * A)
    for donate in (frozenset[int](), frozenset({0}), frozenset({1}), frozenset({0, 1})):
        buffers = [put(device, A), put(device, A * 2)]
        outputs, event, _ = executable.run(buffers, donate)
        event.wait(60)
        for found, wide in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(fetch(device, found), wide)
        for i, array in enumerate((A, A * 2)):
            if i not in donate:
                np.testing.assert_array_equal(fetch(device, buffers[i]), array)


@pytest.mark.parametrize("device_id", FAST)
def test_the_source_of_an_upload_may_be_reused(device_id: str) -> None:
    device = opened(device_id)
    source = A.copy()
    buffer, event = device.upload(source)
    event.wait(60)
    source[...] = -1
    np.testing.assert_array_equal(fetch(device, buffer), A)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == ((2, 3), "float32", 24)


@pytest.mark.parametrize("device_id", FAST)
def test_a_read_only_array_can_be_sent(device_id: str) -> None:
    frozen = A.copy()
    frozen.flags.writeable = False
    device = opened(device_id)
    np.testing.assert_array_equal(fetch(device, put(device, frozen)), A)


def test_a_graph_with_an_unknown_operator_is_refused_by_name() -> None:
    graph = graph_of(lambda a: aten.erfinv(a), (2, 3))
    with pytest.raises(UnsupportedOperatorError, match=r"numpy:cpu:0 cannot run aten.erfinv"):
        opened("numpy:cpu:0").compile(graph)


def test_a_buffer_of_another_device_is_refused() -> None:
    buffer = put(opened("numpy:cpu:0"), A)
    executable = opened("pytorch:cpu:0").compile(graph_of(lambda a: a + 1, (2, 3)))
    with pytest.raises(BackendError, match="pytorch:cpu:0 was given a buffer of numpy:cpu:0"):
        executable.run([buffer])


def test_a_blocking_device_waits_for_earlier_events() -> None:
    waited: list[str] = []

    class Watched(DoneEvent):
        def wait(self, timeout_s: float | None = None) -> None:
            waited.append("wait")

    device = NumpyDevice(opened("numpy:cpu:0").info)
    buffer, event = device.upload(A)
    executable = device.compile(graph_of(lambda a: a + 1, (2, 3)))
    _, ran, chunks = executable.run([buffer], after=[Watched()])
    assert waited == ["wait"]
    assert event.done()
    assert ran.done()
    assert tuple(chunks) == ()
