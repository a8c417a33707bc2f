"""Events: the ends of commands on a device."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Event
from hetpipe.sdk.indices import Bound

from ..lower.lowering import NONE
from ..platform.driver import driver, errors
from .memory import Bytes, Memory
from .opened import OpenedDevice
from .waiting import WAITERS

Flowing = tuple[str, Any]
"""(name of a kernel in a dataflow, its command)."""


class CommandEvent(Event):
    """The end of a command in one of a device's queues."""

    def __init__(self, device: OpenedDevice, command: Any, doing: str) -> None:
        self.device = device
        self.command = command
        self.doing = doing

    def __del__(self) -> None:
        # The thread that uses the queue must release the driver's object.
        self.device.retired.append(self.command)

    def done(self) -> bool:
        with errors(self.device.info.id, self.doing):
            status = self.command.command_execution_status
        if status < 0:
            raise BackendError(f"{self.device.info.id} failed while {self.doing}: status {status}")
        return bool(status == driver().command_execution_status.COMPLETE)

    def wait(self, timeout_s: float | None = None) -> None:
        long = self.device.waits_long(self.command)
        if timeout_s is None and not long:
            with errors(self.device.info.id, self.doing):
                self.command.wait()
            self.done()
            return
        if self.done():
            return
        if long:
            ended, complete = threading.Event(), driver().command_execution_status.COMPLETE
            with errors(self.device.info.id, self.doing):
                self.command.set_callback(complete, lambda status: ended.set())
            in_time = ended.wait(timeout_s)
        else:
            in_time = WAITERS.ends(self.command, timeout_s)
        if not self.done() and not in_time:
            raise BackendError(f"{self.device.info.id} is still {self.doing} after {timeout_s} s")

    @property
    def span_s(self) -> tuple[float, float]:
        """Start and end of the command on the device's clock, in seconds."""
        with errors(self.device.info.id, self.doing):
            profile = self.command.profile
            return profile.start * 1e-9, profile.end * 1e-9


@dataclass(frozen=True)
class Outcome:
    """The result of a check in one run; its 8 bytes are in `host` when the run has ended."""

    bound: Bound
    memory: Memory
    host: Bytes

    def check(self, device_id: str) -> None:
        """Raise `BackendError` if an index was out of range."""
        least = int(self.host[:8].view(np.int64)[0])
        if least != NONE:
            raise self.bound.error(device_id, least)


class PassEvent(CommandEvent):
    """The end of a pass; it raises an error if the pass met an index out of range."""

    def __init__(
        self,
        device: OpenedDevice,
        command: Any,
        doing: str,
        outcomes: Sequence[Outcome],
        flowing: Sequence[Flowing] = (),
    ) -> None:
        super().__init__(device, command, doing)
        self._outcomes = outcomes
        self._flowing = flowing

    def __del__(self) -> None:
        super().__del__()
        self.device.retired.extend(command for _, command in self._flowing)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the pass.

        Raises `BackendError` after `timeout_s`, or if no kernel of the pass's dataflows makes
        progress for the device's `dataflow_limit_s`.
        """
        if not self._flowing:
            super().wait(timeout_s)
            return
        if self.done():
            return
        ended, complete = threading.Event(), driver().command_execution_status.COMPLETE
        with errors(self.device.info.id, self.doing):
            self.command.set_callback(complete, lambda status: ended.set())
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        limit_s, states = self.device.dataflow_limit_s, self._states()
        while not ended.wait(min(limit_s, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise self._late(f"after {timeout_s} s")
            before, states = states, self._states()
            if before == states:
                self.device.stuck = True
                raise self._late(f"and none of its kernels has ended for {limit_s} s")
        self.done()

    def _states(self) -> list[tuple[str, int]]:
        """Return (name, OpenCL state) of each dataflow kernel that has not ended."""
        with errors(self.device.info.id, self.doing):
            states = [(name, each.command_execution_status) for name, each in self._flowing]
        complete = driver().command_execution_status.COMPLETE
        return [(name, state) for name, state in states if state != complete]

    def _late(self, when: str) -> BackendError:
        running = driver().command_execution_status.RUNNING
        states = [
            f"{name} {'runs' if state == running else 'waits to begin'}"
            for name, state in self._states()
        ]
        what = f"{self.device.info.id} is still {self.doing} {when}"
        return BackendError(f"{what}: {', '.join(states)}" if states else what)

    def done(self) -> bool:
        ended = super().done()
        if ended:
            for outcome in self._outcomes:
                outcome.check(self.device.info.id)
            self._outcomes = ()  # frees their memory
        return ended
