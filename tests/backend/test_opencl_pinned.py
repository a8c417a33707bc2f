"""Copies through pinned memory, and waits that sleep: what drivers of graphics cards need."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from as_gpu import AsGpu
from found_devices import infos
from hetpipe.backends.opencl.device import OpenCLDevice
from hetpipe.backends.opencl.platform.runtimes import spins
from hetpipe.backends.opencl.run import events, staging
from hetpipe.backends.opencl.run.events import CommandEvent
from opencl_devices import IDS

from hetpipe.errors import BackendError

cl = pytest.importorskip("pyopencl")


@pytest.fixture(params=IDS)
def card(request: pytest.FixtureRequest) -> OpenCLDevice:
    """Return a device, opened as a card with separate memory."""
    info = next(info for info in infos() if info.id == request.param)
    name = f"as-gpu{info.id[6:]}"
    device = AsGpu().open(replace(info, id=name, kind="gpu", memory_domain=name))
    assert isinstance(device, OpenCLDevice)
    if device.info.on_cores:
        pytest.skip("an emulator computes on the cores of the host")
    return device


def test_copies_use_the_same_pinned_memory_again(card: OpenCLDevice) -> None:
    assert card.staging is not None
    for number in range(4):
        array, back = np.full((3, 700), number, np.float32), np.empty((3, 700), np.float32)
        buffer, event = card.upload(array)
        array += 1  # the upload has read the array
        event.wait(60.0)
        done = card.download(buffer, back)
        done.wait(60.0)
        assert (back == number).all()
    part = np.empty(5, np.float32)
    card.download_part(buffer, 7, 12, part).wait(60.0)
    assert (part == 3).all()
    del done, event
    card.trim()
    assert card.staging.held_nbytes == 0


def test_at_most_three_pieces_are_pinned(card: OpenCLDevice) -> None:
    """An upload, a download, and the last command that the device still holds."""
    assert card.staging is not None
    array = np.ones(1 << 14, np.uint8)
    for _ in range(9):
        buffer, event = card.upload(array)
        event.wait(60.0)
        card.download(buffer, np.empty_like(array)).wait(60.0)
    assert 0 < card.staging.held_nbytes <= 3 << 14


def test_a_large_copy_is_left_to_the_driver(
    card: OpenCLDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LARGEST_NBYTES", 1 << 12)
    array, back = np.arange(5000.0), np.empty(5000)
    buffer, event = card.upload(array)
    event.wait(60.0)
    card.download(buffer, back).wait(60.0)
    np.testing.assert_array_equal(back, array)
    assert card.staging is not None
    assert card.staging.held_nbytes == 0


class Clock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Command:
    """A command that ends at a time; the driver's wait for it would spin."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        self.clock, self.end_s, self.looks = clock, end_s, 0

    @property
    def command_execution_status(self) -> int:
        self.looks += 1
        complete = cl.command_execution_status
        return int(complete.COMPLETE if self.clock.now_s >= self.end_s else complete.RUNNING)

    def wait(self) -> None:
        raise AssertionError("clWaitForEvents")


@pytest.mark.parametrize("timeout_s", [None, 9.0])
def test_a_wait_sleeps_where_the_driver_would_spin(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting worker kept a core busy that others need."""
    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    command = Command(clock, 0.25)
    device: Any = SimpleNamespace(
        info=SimpleNamespace(id="card"), spins=True, retired=deque(), waits_long=lambda _: False
    )
    CommandEvent(device, command, "running").wait(timeout_s)
    assert 0.25 <= clock.now_s < 0.252
    assert command.looks < 400
    with pytest.raises(BackendError, match=r"card is still running after 0.1 s"):
        CommandEvent(device, Command(clock, 99.0), "running").wait(0.1)


def test_the_wait_of_nvidias_driver_spins() -> None:
    assert spins("NVIDIA CUDA")
    assert not any(
        map(spins, ("Portable Computing Language", "AMD Accelerated", "Intel(R) OpenCL"))
    )
