"""A companion runs only the operators that a device refuses; the results stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import Array, fetch, infos, opened, put, trace
from hetpipe.backends.numpy import NumpyBackend, NumpyDevice
from hetpipe.backends.opencl import OpenCLBackend
from models import MLP, batches
from reference import train
from torch import fx

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.graph import graph_calls, operator_name
from hetpipe.sdk.host import registry
from hetpipe.sdk.host.companion import CompanionDevice
from hetpipe.sdk.info import DeviceInfo

TABLE = NumpyBackend().decompositions()
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


class Lacking(NumpyDevice):
    """A numpy device without the operators in `lacks`."""

    lacks: frozenset[str] = frozenset({"aten.tanh.default", "aten.sigmoid.default"})

    def supports(self, node: fx.Node) -> str | None:
        if operator_name(node) in self.lacks:
            return "no kernel yet"
        return super().supports(node)


class LackingBackend(NumpyBackend):
    name = "lacking"
    lends = "numpy"

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        return [replace(info, id=f"{self.name}:unit:0", backend=self.name)]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        return Lacking(info)


class Alone(LackingBackend):
    name = "alone"
    lends = ""


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))


def network(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.mm(x, w)
    b = torch.tanh(a) + x
    c = torch.mm(b, w).sigmoid()
    value, place = (c * b).max(1)
    return a, c.sum(0), x, (c - a).exp(), b, c, value, place, a


def pair(lacks: frozenset[str]) -> CompanionDevice:
    own = type("Own", (Lacking,), {"lacks": lacks})(LackingBackend().discover()[0])
    return CompanionDevice(own, opened("numpy:cpu:0"))


def results(device: Device, graph: fx.GraphModule, donate: Sequence[int] = ()) -> list[Array]:
    buffers = [put(device, tensor.numpy()) for tensor in (X, W)]
    outputs, event, chunks = device.compile(graph).run(buffers, frozenset(donate))
    assert not chunks
    return [fetch(device, buffer, [event]) for buffer in outputs]


@pytest.mark.parametrize("seed", range(40))
def test_any_operators_may_run_on_the_companion(seed: int) -> None:
    graph = trace(network, [X, W], TABLE)
    names = sorted({operator_name(node) for node in graph_calls(graph)} - {"getitem"})
    chosen = random.Random(seed)
    lacks = frozenset(name for name in names if chosen.random() < 0.1 * (seed % 11))
    donate = [index for index in (0, 1) if chosen.random() < 0.5]
    for result, right in zip(
        results(pair(lacks), graph, donate),
        results(opened("numpy:cpu:0"), graph),
        strict=True,
    ):
        np.testing.assert_array_equal(result, right)


def test_results_are_buffers_of_the_device_or_the_placeholders() -> None:
    device = pair(Lacking.lacks)
    graph = trace(network, [X, W], TABLE)
    x, w = (device.upload(tensor.numpy())[0] for tensor in (X, W))
    outputs, event, _ = device.compile(graph).run([x, w])
    event.wait()
    assert outputs[2] is x
    assert outputs[0] is outputs[8]
    assert all(buffer.device is device.device for buffer in outputs)


def test_a_graph_without_lent_operators_compiles_as_usual() -> None:
    device = pair(frozenset({"aten.tanh.default"}))
    whole = device.compile(trace(lambda x, w: x + w, [W, W], TABLE))
    assert type(whole) is type(device.device.compile(trace(lambda x, w: x + w, [W, W], TABLE)))
    assert device.lent(trace(lambda x, w: x + w, [W, W], TABLE)) == []


def test_lent_operators_are_named_with_their_bytes() -> None:
    device = pair(frozenset({"aten.tanh.default"}))
    (lent,) = device.lent(trace(lambda x: torch.tanh(x + 1.0) * 2.0, [X], TABLE))
    assert (lent.operator, lent.calls) == ("aten.tanh.default", 1)
    assert (lent.there_nbytes, lent.back_nbytes) == (6 * 8 * 4, 6 * 8 * 4)


def test_an_opencl_device_may_borrow() -> None:
    if not any(info.backend == "opencl" for info in infos()):
        pytest.skip("no OpenCL device is here")
    registry.register_backend(
        type("Borrower", (OpenCLBackend,), {"name": "borrower", "lends": "numpy"})
    )
    device = registry.open_device(registry.devices_of("borrower")[0].id)
    graph = trace(lambda x, w: (torch.relu(x @ w) * 2.0).cumsum(0).tanh(), [X, W], TABLE)
    assert isinstance(device, CompanionDevice)
    assert [lent.operator for lent in device.lent(graph)] == ["aten.cumsum.default"]
    expected = (torch.relu(X.double() @ W.double()) * 2.0).cumsum(0).tanh()
    np.testing.assert_allclose(results(device, graph)[0], expected, atol=1e-5)


def test_an_operator_neither_has_is_refused_with_both_reasons() -> None:
    device = pair(Lacking.lacks)
    graph = trace(torch.erfinv, [X], {})
    with pytest.raises(
        UnsupportedOperatorError, match="no such operator; its companion numpy:cpu:0: the reference"
    ):
        device.compile(graph)


def test_weights_cross_once_for_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pair(frozenset({"aten.mm.default"}))
    graph = trace(lambda x, w: torch.mm(x, w) + 1.0, [X, W], TABLE)
    [node for node in graph.graph.nodes if node.op == "placeholder"][1].meta["steady"] = True
    executable = device.compile(graph)
    shapes: list[tuple[int, ...]] = []
    upload = device.companion.upload

    def counted(src: Any) -> Any:
        shapes.append(src.shape)
        return upload(src)

    monkeypatch.setattr(device.companion, "upload", counted)
    x, w = (device.upload(tensor.numpy())[0] for tensor in (X, W))
    for _ in range(3):
        executable.run([x, w])
    assert shapes.count(W.numpy().shape) == 1
    other: Buffer = device.upload(2 * W.numpy())[0]
    (result,), _, _ = executable.run([x, other])
    expected = (X @ (2 * W) + 1.0).numpy()
    np.testing.assert_allclose(fetch(device, result), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_stage_trains_with_lent_operators_and_the_plan_names_them(transport: str) -> None:
    registry.register_backend(LackingBackend)
    torch.manual_seed(0)
    model = MLP()
    expected = train(
        model, torch.nn.functional.cross_entropy, batches(3), 3,
        lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    members = (Member("a", "lacking:unit:0"), Member("b", "numpy:cpu:0"))
    with hp.Pipeline(
        model, torch.nn.functional.cross_entropy, batches(1)[0],
        cluster=Cluster(members, transport=transport), optimizer=hp.optim.sgd(lr=0.1),
        cuts=[3], microbatches=3, schedule="gpipe",
    ) as pipe:  # fmt: skip
        losses = [pipe.step(x, y) for x, y in batches(3)]
        notes = pipe.plan.notes
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    (note,) = [note for note in notes if "aten.tanh.default" in note]
    assert note.startswith("numpy runs aten.tanh.default of layers.0 for a, 1 times in the forward")


def test_without_a_companion_the_operator_is_refused() -> None:
    """Without `lends`, the operator is refused."""
    registry.register_backend(Alone)
    device = registry.open_device("alone:unit:0")
    with pytest.raises(UnsupportedOperatorError, match="alone:unit:0 cannot run aten"):
        device.compile(trace(torch.tanh, [X], TABLE))


@pytest.mark.parametrize(
    ("lends", "problem"),
    [
        ("lacking", "which is the same backend: name another backend"),
        ("nobody", "which has no devices here: no backend 'nobody'"),
        ("numpy:cpu:7", "which is not on this machine; found: numpy:cpu:0"),
    ],
)
def test_a_missing_companion_is_reported(lends: str, problem: str) -> None:
    registry.register_backend(type("Lost", (LackingBackend,), {"lends": lends}))
    with pytest.raises(BackendError, match=problem):
        registry.open_device("lacking:unit:0")
