"""Events: the ends of commands on a device, and threads that wait for them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Event
from hetpipe.sdk.indices import Bound

from ..lower.lowering import NONE
from ..platform.driver import driver, errors
from .memory import Bytes, Memory
from .opened import OpenedDevice
from .staging import Pinned

LEAST_PAUSE_S, MOST_PAUSE_S = 2e-5, 1e-3
"""Bounds of the pause between two looks at a command: a sixteenth of the time waited so far."""
Flowing = tuple[str, Any]
"""(name of a kernel in a dataflow, its command)."""
_Wait = tuple[Any, threading.Lock]
"""A command, and a lock that is held until the command has ended."""


class Waiters:
    """A pool of threads that wait for commands: starting a thread takes longer than a small pass.

    A thread starts if none is idle. A command that hangs keeps its thread until the process ends.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Wait]] = []

    def ends(self, command: Any, timeout_s: float | None) -> bool:
        """Return whether a command ends within the limit; a command that fails also ends."""
        held = threading.Lock()
        held.acquire()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(jobs,), name="hetpipe opencl wait", daemon=True
            ).start()
        jobs.put((command, held))
        return held.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def _serve(self, jobs: SimpleQueue[_Wait]) -> None:
        while True:
            command, held = jobs.get()
            with suppress(driver().Error):  # the caller reads the error from the command's state
                command.wait()
            del command  # the thread that uses the queue must delete the driver's object
            self._idle.append(jobs)
            held.release()


WAITERS = Waiters()


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
        long, spins = self.device.waits_long(self.command), self.device.spins
        if timeout_s is None and not long and not spins:
            with errors(self.device.info.id, self.doing):
                self.command.wait()
            self.done()
            return
        if self.done():
            return
        if spins:
            in_time = self._looks(timeout_s)
        elif long:
            in_time = self.told().wait(timeout_s)
        else:
            in_time = WAITERS.ends(self.command, timeout_s)
        if not self.done() and not in_time:
            raise BackendError(f"{self.device.info.id} is still {self.doing} after {timeout_s} s")

    def _looks(self, timeout_s: float | None) -> bool:
        """Return whether the command ends within the limit; sleep between two looks at it."""
        begin_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - begin_s
            if timeout_s is not None and waited_s >= timeout_s:
                return False
            time.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, waited_s / 16)))
        return True

    def told(self) -> threading.Event:
        """Return an event that the driver sets when the command has ended."""
        ended, complete = threading.Event(), driver().command_execution_status.COMPLETE
        with errors(self.device.info.id, self.doing):
            self.command.set_callback(complete, lambda status: ended.set())
        return ended


class DownloadEvent(CommandEvent):
    """The end of a copy to pinned memory; `done` and `wait` then copy the bytes to their target."""

    def __init__(self, device: OpenedDevice, command: Any, pinned: Pinned, target: Bytes) -> None:
        super().__init__(device, command, "copying")
        self._lock = threading.Lock()
        self._copy: tuple[Pinned, Bytes] | None = (pinned, target)

    def done(self) -> bool:
        ended = super().done()
        if ended:
            with self._lock:  # the pinned memory returns to its pool after the copy
                if self._copy is not None:
                    pinned, target = self._copy
                    np.copyto(target, pinned.bytes(target.nbytes))
                    self._copy = None
        return ended


@dataclass(frozen=True)
class Outcome:
    """The result of an index check in one run: 8 bytes in `host`, once the run has ended."""

    bound: Bound
    memory: Memory
    host: Bytes

    def check(self, device_id: str) -> None:
        """Raise `BackendError` if an index was out of range."""
        least = int(self.host[:8].view(np.int64)[0])
        if least != NONE:
            raise self.bound.error(device_id, least)


class PassEvent(CommandEvent):
    """The end of a pass. `done` and `wait` raise an error if an index was out of range."""

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
        ended = self.told()
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
            self._outcomes = ()  # frees the memory of the outcomes
        return ended


def commands_of(device: OpenedDevice, events: Sequence[Event]) -> list[Any] | None:
    """Wait for the events of other devices; return the pending commands of this device's events."""
    waits = []
    for event in events:
        if isinstance(event, CommandEvent) and event.device is device:
            if not event.done():
                waits.append(event.command)
        else:
            event.wait()
    return waits or None
