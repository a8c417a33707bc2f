"""Waits with a time limit reuse their threads, and a hanging command delays no other."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from found_devices import put, trace
from hetpipe.backends.opencl.run.events import Waiters
from opencl_devices import IDS, opencl_device

from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import get_backend

SOON_S = 0.02


class Command:
    """A command that ends when `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.threads: list[threading.Thread] = []

    def wait(self) -> None:
        self.threads.append(threading.current_thread())
        self.ended.wait()


def ended() -> Command:
    command = Command()
    command.ended.set()
    return command


def test_one_thread_waits_for_all_commands_in_turn() -> None:
    waiters, commands = Waiters(), [ended() for _ in range(5)]
    assert all(waiters.ends(command, 10.0) for command in commands)
    assert len({id(command.threads[0]) for command in commands}) == 1


def test_a_hanging_command_delays_no_other() -> None:
    waiters, hanging, other = Waiters(), Command(), ended()
    assert not waiters.ends(hanging, SOON_S)
    assert waiters.ends(other, None)
    hanging.ended.set()
    assert waiters.ends(hanging, 10.0)


@pytest.mark.parametrize("device_id", IDS)
def test_a_pass_beyond_its_limit_is_named(device_id: str) -> None:
    device = opencl_device(device_id)
    if device.target.checks_memory:
        pytest.skip("an interpreter has done the work when it takes the command")
    x = torch.zeros(640, 640)
    graph = trace(lambda a: (a @ a @ a @ a,), (x,), get_backend("opencl").decompositions())
    (result,), event, _ = device.compile(graph).run([put(device, x.numpy())])
    with pytest.raises(BackendError, match=r"is still running a graph after 1e-06 s"):
        event.wait(1e-6)
    event.wait(60.0)
    host = np.ones((640, 640), np.float32)
    device.download(result, host).wait(60.0)
    assert not host.any()
