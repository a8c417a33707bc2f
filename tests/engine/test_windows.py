"""Messages from the memory of one accelerator to the memory of another, on simulated cards."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from as_card import AsCard, AsPeer, CardDevice
from hetpipe.backends.pytorch.options import Options
from two_workers import losses_of

import hetpipe as hp
from hetpipe.capture.program import INPUT, Slot
from hetpipe.cluster.topology import Link
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device
from hetpipe.wire import sharedmemory
from hetpipe.wire.sharedmemory import WindowWarning
from hetpipe.wire.shares import Replica
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet
from hetpipe.wire.wire import Content, Kind, Wire

FORWARD, SUM = Kind(Content.FORWARD, 4), Kind(Content.ALL_REDUCE, 0)
LAYOUT = (Slot("x", INPUT, (4, 3), "float32"), Slot("n", INPUT, (5,), "int64"))
WIRE = Wire(Replica(0, 0), Replica(1, 0), {FORWARD: LAYOUT, SUM: LAYOUT[:1]})


@pytest.fixture(autouse=True)
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files that stand for memory of cards in a folder of the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def cards(backend: type[AsCard] = AsPeer) -> list[CardDevice]:
    """Return two devices of a backend, as two workers have them."""
    made, opened = backend(), []
    for _ in range(2):
        device = made.open(made.discover()[0])
        assert isinstance(device, CardDevice)
        opened.append(device)
    return opened


def ends(devices: list[CardDevice], direct: bool = True) -> tuple[Outlet, Inlet]:
    (port, sending), (_, receiving) = sharedmemory.plugs(WIRE, (0, 1), 0, 1, direct)
    outlet = port.outlet(WIRE, devices[0], Link(), sending)
    return outlet, port.inlet(WIRE, devices[1], receiving)


def message(number: int) -> list[np.ndarray[Any, Any]]:
    return [np.full((4, 3), number + 0.5, np.float32), np.arange(5) * number]


def send(outlet: Outlet, device: Device, number: int, kind: Kind = FORWARD) -> None:
    uploads = [device.upload(array) for array in message(number)[: len(WIRE.layouts[kind])]]
    for _, event in uploads:
        event.wait()
    outlet.send(kind, [buffer for buffer, _ in uploads])


def send_many(outlet: Outlet, device: Device, count: int) -> None:
    for number in range(count):
        send(outlet, device, number)


def received(inlet: Inlet, device: Device, kind: Kind = FORWARD) -> list[np.ndarray[Any, Any]]:
    tensors, _ = inlet.receive(kind)
    found = []
    for tensor in tensors:
        if not isinstance(tensor, np.ndarray):
            host = np.empty(tensor.shape, tensor.dtype)
            device.download(tensor, host).wait()
            tensor = host
        found.append(tensor)
    return found


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record where each message was when the receiver took it."""
    seen: list[int] = []
    take = sharedmemory.RingInlet._take

    def watched(self: Any, kind: Kind) -> Any:
        result = take(self, kind)
        seen.append(int(self._ring.place))
        return result

    monkeypatch.setattr(sharedmemory.RingInlet, "_take", watched)
    return seen


def exchange(devices: list[CardDevice], outlet: Outlet, inlet: Inlet, count: int) -> None:
    """Send messages from a thread, and check each."""
    sender = threading.Thread(target=send_many, args=(outlet, devices[0], count))
    sender.start()
    for number in range(count):
        for found, wanted in zip(received(inlet, devices[1]), message(number), strict=True):
            np.testing.assert_array_equal(found, wanted)
    sender.join(30)
    assert not sender.is_alive()


def test_messages_stay_on_the_cards(places: list[int]) -> None:
    devices = cards()
    outlet, inlet = ends(devices)
    send(outlet, devices[0], 1)
    received(inlet, devices[1])
    staged = [device.staged for device in devices]
    exchange(devices, outlet, inlet, 20)
    assert places == [sharedmemory.BOTH] + [sharedmemory.WINDOW] * 20
    # The test itself uploads 2 tensors for each message, and downloads them.
    assert [device.staged - s for device, s in zip(devices, staged, strict=True)] == [40, 40]
    send(outlet, devices[0], 7, SUM)  # the host adds these
    np.testing.assert_array_equal(received(inlet, devices[1], SUM)[0], message(7)[0])
    assert places[-1] == sharedmemory.HOST
    outlet.close()
    with pytest.raises(EdgeClosedError):
        inlet.receive(FORWARD)
    inlet.close()


@pytest.mark.parametrize("direct", [False, True])
def test_without_a_window_messages_pass_through_the_host(direct: bool, places: list[int]) -> None:
    devices = cards(AsCard)
    outlet, inlet = ends(devices, direct)
    exchange(devices, outlet, inlet, 12)
    assert set(places) == {sharedmemory.HOST}
    for end in (outlet, inlet):
        end.close()


def test_a_sender_waits_until_the_receiver_is_open() -> None:
    devices = cards()
    (port, sending), (_, receiving) = sharedmemory.plugs(WIRE, (0, 1), 0, 1, True)
    outlet = port.outlet(WIRE, devices[0], Link(), sending)
    sender = threading.Thread(target=send, args=(outlet, devices[0], 3))
    sender.start()
    assert not outlet._has_room()
    inlet = port.inlet(WIRE, devices[1], receiving)
    np.testing.assert_array_equal(received(inlet, devices[1])[0], message(3)[0])
    sender.join(30)
    inlet.close()
    with pytest.raises(EdgeClosedError):
        send_many(outlet, devices[0], 9)  # more than the ring has slots
    outlet.close()


def test_a_window_out_of_reach_is_reported(
    monkeypatch: pytest.MonkeyPatch, places: list[int]
) -> None:
    def refuse(self: CardDevice, handle: bytes, nbytes: int) -> torch.Tensor:
        raise RuntimeError("peer access is not supported between these two devices")

    monkeypatch.setattr(CardDevice, "mapped_memory", refuse)
    devices = cards()
    outlet, inlet = ends(devices)
    with pytest.warns(WindowWarning, match=r"pass through the host.*peer access is not supported"):
        send(outlet, devices[0], 2)
    np.testing.assert_array_equal(received(inlet, devices[1])[0], message(2)[0])
    assert places == [sharedmemory.HOST]
    for end in (outlet, inlet):
        end.close()


def test_wrong_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: CardDevice, handle: bytes, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(CardDevice, "mapped_memory", other)
    devices = cards()
    outlet, inlet = ends(devices)
    send(outlet, devices[0], 2)
    with pytest.raises(BackendError, match="bytes of tensor 0 from stage 0 are wrong after a copy"):
        inlet.receive(FORWARD)
    for end in (outlet, inlet):
        end.close()


def test_a_window_that_does_not_open_is_reported(
    monkeypatch: pytest.MonkeyPatch, places: list[int]
) -> None:
    def refuse(self: CardDevice, nbytes: int) -> tuple[torch.Tensor, bytes]:
        raise torch.OutOfMemoryError("no room for a window")

    monkeypatch.setattr(CardDevice, "shared_memory", refuse)
    devices = cards()
    with pytest.warns(WindowWarning, match=r"from stage 0 to stage 1.*no room for a window"):
        outlet, inlet = ends(devices)
    exchange(devices, outlet, inlet, 3)
    assert set(places) == {sharedmemory.HOST}
    for end in (outlet, inlet):
        end.close()


def test_only_cuda_and_rocm_have_peer_copies() -> None:
    Options(peer_copies=True).check("pytorch:cuda:0", "cuda")
    with pytest.raises(BackendError, match="peer_copies needs CUDA or ROCm"):
        Options(peer_copies=True).check("pytorch:xpu:0", "xpu")


@pytest.mark.slow
def test_a_training_over_windows_equals_torch(tmp_path: Path) -> None:
    hp.register_backend(AsPeer)
    device = AsPeer().discover()[0].id
    losses, expected = losses_of((device, device), "shared-memory")
    assert losses == pytest.approx(expected, rel=1e-4)
    windows = [path.read_bytes() for path in tmp_path.rglob("window-*")]
    assert len([window for window in windows if any(window)]) >= 2, "one for each direction"
