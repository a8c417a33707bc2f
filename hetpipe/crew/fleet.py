"""Starts workers, as processes or as threads, watches them, and ends them completely."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from hetpipe.cluster.transports import Transport
from hetpipe.crew.control import Control, Reports
from hetpipe.crew.forkserver import FORK_S, WorkerProcess, start_worker
from hetpipe.crew.plugboard import Plugboard
from hetpipe.crew.vigil import Vigil
from hetpipe.errors import BackendError, HetpipeError, WorkerError
from hetpipe.memory import anonymous_file
from hetpipe.process import LOOK_S
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.isolation import blamed
from hetpipe.sdk.host.registry import open_device
from hetpipe.sockets import socket_pair
from hetpipe.wire.channel import Channel
from hetpipe.wire.copy_messages import Lend
from hetpipe.wire.ends import Route, WireEnd
from hetpipe.wire.messages import Open, Stop
from hetpipe.worker.blame import summary
from hetpipe.worker.service import Service

logger = logging.getLogger("hetpipe")

LEAVE_S = 2.0
"""Seconds that a worker may take to end before it is killed."""
LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Error numbers of a send that fails because of this process, not because of the worker."""


class Fleet(ABC):
    """Started workers, by number."""

    control: Reports
    apart = True  # whether each worker is a separate process
    keep: Any = None  # an object that lives as long as the workers

    @abstractmethod
    def send(self, worker: int, message: Any) -> None:
        """Send a message to a worker. Raises `WorkerError` if the worker is gone."""

    @abstractmethod
    def connect(self, worker: int, ends: Sequence[WireEnd]) -> None:
        """Give a worker its ends of wires, for the next `Load`. Raises `WorkerError` as `send`."""

    def lend(self, worker: int, number: int, nbytes: int) -> mmap.mmap | None:
        """Lend a worker memory for copies; None if it has to send pieces. Raises `WorkerError` as
        `send`, and `HetpipeError` if the system has no room."""
        return None

    def route(self, source: int, target: int) -> Route | None:
        """Return how a new wire between two workers is connected; None inside a host."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all workers; no worker's process runs after the return."""


class ThreadFleet(Fleet):
    """Workers as threads of this process. A device is opened once, for all its workers."""

    apart = False

    def __init__(self, control: Control, orders: Sequence[Open], transport: Transport) -> None:
        self.control = control
        self._plugboard = Plugboard(transport)
        self._devices: dict[str, Device] = {}
        # Held while a device opens, so that no device opens twice; never held while a thread sends
        # or waits.
        self._opening = threading.Lock()
        self._services = [
            Service(order, partial(control.arrived, i), self._open)
            for i, order in enumerate(orders)
        ]
        control.doing = [partial(getattr, service, "doing") for service in self._services]
        control.on_failure = self._abort
        self._threads = [
            threading.Thread(target=service.serve, name=order.member.id, daemon=True)
            for service, order in zip(self._services, orders, strict=True)
        ]
        for thread in self._threads:
            _start(thread)

    def send(self, worker: int, message: Any) -> None:
        self.control.check()
        self._services[worker].deliver(message)

    def lend(self, worker: int, number: int, nbytes: int) -> mmap.mmap | None:
        descriptor = anonymous_file(nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        self._services[worker].deliver(Lend(number), [descriptor])  # the worker closes it
        return memory

    def connect(self, worker: int, ends: Sequence[WireEnd]) -> None:
        with self._plugboard.connect(ends) as (edges, _):
            self.send(worker, edges)

    def close(self) -> None:
        if not self.control.owns:
            return
        self._abort()
        end_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._threads):
            for device in self._devices.values():
                _close(device)
            self._devices.clear()

    def _abort(self) -> None:
        for service in self._services:
            service.abort()

    def _open(self, device_id: str) -> Device:
        with self._opening:
            if device_id not in self._devices:
                self._devices[device_id] = open_device(device_id)
            return self._devices[device_id]


def _close(device: Device) -> None:
    """Close a device. A failure is only a warning, since the device is not used afterwards."""
    name = device.info.backend
    try:
        with blamed(name, f"fails to close device {device.info.id}"):
            device.close()
    except BackendError as error:
        logger.warning("%s", error)


class ProcessFleet(Fleet):
    """Workers as processes. A thread of the controller, the watcher, starts the workers, receives
    all their messages and ends them.

    A message may be sent before its worker has started; it waits in the channel. Threads other than
    the watcher change only `_closing`, and ring the bell, which wakes the watcher.
    """

    def __init__(
        self,
        control: Reports,
        orders: Sequence[Open],
        settings: Sequence[Mapping[str, str]],
        silence_s: float,
        plugboard: Plugboard,
    ) -> None:
        self.control = control
        self._plugboard = plugboard
        control.on_failure = self._wake
        self._orders = orders
        self._settings = settings
        self._vigils = [Vigil(silence_s) for _ in orders]
        self._children: list[WorkerProcess] = []
        pairs = [socket_pair() for _ in orders]
        self._channels = [Channel(ours) for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        for channel, order in zip(self._channels, orders, strict=True):
            channel.send(order)
        self._closing = False
        self._alarm, self._bell = socket_pair()
        self._thread = threading.Thread(target=self._watch, name="hetpipe crew", daemon=True)
        try:
            _start(self._thread)
        except WorkerError:
            self._close_sockets()
            raise

    def connect(self, worker: int, ends: Sequence[WireEnd]) -> None:
        with self._plugboard.connect(ends) as (edges, fds):
            self._send(worker, edges, fds)

    def send(self, worker: int, message: Any) -> None:
        self._send(worker, message)

    def lend(self, worker: int, number: int, nbytes: int) -> mmap.mmap | None:
        descriptor = anonymous_file(nbytes)
        try:
            memory = mmap.mmap(descriptor, nbytes)
            self._send(worker, Lend(number), [descriptor])
        finally:
            os.close(descriptor)
        return memory

    def _send(self, worker: int, message: Any, fds: Sequence[int] = ()) -> None:
        self.control.check()
        try:
            self._channels[worker].send(message, fds)
        except OSError as error:
            if error.errno in LACKS:
                label = self.control.label(worker)
                raise HetpipeError(f"no message can be sent to {label}: {error}") from error
            self.control.await_failure(worker, LEAVE_S)

    def close(self) -> None:
        if not self.control.owns:
            return  # a fork of the controller has no workers
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:  # collected by the watcher
            self._thread.join()
        self._plugboard.close()
        self.keep = None

    def _wake(self) -> None:
        with suppress(OSError):
            self._bell.send(b"\1")

    def _watch(self) -> None:
        try:
            # The processes started here inherit the mask, so Ctrl-C only reaches the controller.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for end, order, settings in zip(
                self._theirs, self._orders, self._settings, strict=True
            ):
                self._children.append(start_worker(end, order.member.cores, settings))
                end.close()  # otherwise the channel would not end with its worker
            self._listen()
        except Exception as error:
            why = f"the workers cannot be started: {summary(error)}"
            self.control.fail(why, lost=range(len(self._orders)))
        finally:
            self._bury()

    def _listen(self) -> None:
        sources: list[Any] = [*self._channels, self._alarm]
        look_s = time.monotonic() + LOOK_S
        while not (self._closing or self.control.failed):
            ready = wait(sources, max(look_s - time.monotonic(), 0.0))
            # Read all pending messages before a worker counts as silent.
            while ready and not (self._closing or self.control.failed):
                for source in ready:
                    if isinstance(source, Channel):
                        self._hear(self._channels.index(source))
                    else:
                        self._alarm.recv(64)  # `close` or a failure rang the bell; the loop checks
                ready = wait(sources, 0)
            if time.monotonic() >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S

    def _hear(self, worker: int) -> None:
        try:
            packed, _ = self._channels[worker].receive_packed()
            message = packed if self.control.relays else packed.unpack()
        except EOFError:
            self._died(worker)
            return
        except HetpipeError as error:  # the worker is not the cause
            label = self._describe(worker)
            self.control.fail(f"a message of {label} cannot be received: {error}")
            return
        except Exception as error:
            self.control.fail(
                f"{self._describe(worker)} has sent a message that cannot be read: "
                f"{type(error).__name__}: {error}",
                lost=[worker],
            )
            return
        self._vigils[worker].hear()
        self.control.arrived(worker, message)

    def _died(self, worker: int) -> None:
        code = self._children[worker].wait(LEAVE_S)
        if code is None:
            text = f"{self._describe(worker)} has closed its connection but still runs"
            self.control.fail(text, lost=[worker])
            return
        if code >= 0:
            end = f"ended with status {code}; its own messages are above"
        else:
            end = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                end += " (the kernel sends it when memory runs out)"
        self.control.fail(f"{self._describe(worker)} {end}", lost=[worker])

    def _look(self) -> None:
        for worker, (vigil, child) in enumerate(zip(self._vigils, self._children, strict=True)):
            if problem := vigil.look(child.pid or child.server.pid):
                self.control.fail(f"{self._describe(worker)} {problem}", lost=[worker])

    def _describe(self, worker: int) -> str:
        child, doing = self._children[worker], self.control.doing_of(worker)
        process = f"process {child.pid}" if child.pid else f"fork server {child.server.pid}"
        at = "" if doing == "idle" else f", last at {doing}"
        return f"{self.control.label(worker)} ({process}{at})"

    def _bury(self) -> None:
        """Ask all workers to end, kill the remaining workers, and wait until all have ended."""
        if not self.control.failed:
            for channel in self._channels:
                with suppress(OSError):
                    channel.send(Stop())
            end_s = time.monotonic() + LEAVE_S
            for child in self._children:
                if child.pid is not None:
                    child.wait(end_s - time.monotonic())
        for child in self._children:
            child.kill()
        self._close_sockets()  # a worker that starts only now sees a closed channel
        end_s = time.monotonic() + FORK_S
        for child in self._children:
            child.wait_for_end(end_s - time.monotonic())

    def _close_sockets(self) -> None:
        for channel in self._channels:
            channel.close()
        for end in (*self._theirs, self._alarm, self._bell):
            end.close()


def _start(thread: threading.Thread) -> None:
    """Start a thread. Raises `WorkerError` if the system refuses."""
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerError(f"the workers cannot be started: {summary(error)}") from error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
