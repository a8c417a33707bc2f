"""Opens a worker's device and obeys the controller's commands, one after another (stations 4 and 13
of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hetpipe.capture.program import GRAD
from hetpipe.errors import HetpipeError
from hetpipe.sdk.backend import Buffer, Device, Group
from hetpipe.sdk.host.references import load_reference
from hetpipe.sdk.host.registry import configure_backend, open_device
from hetpipe.sdk.host.validation import join_group
from hetpipe.wire import messages as say
from hetpipe.wire.copy_messages import Copy, Lend
from hetpipe.wire.edges import Receiver, Sender, open_edges
from hetpipe.wire.ends import EdgeEnd, Edges, Severed
from hetpipe.wire.shares import Replica
from hetpipe.wire.transport import EdgeClosedError
from hetpipe.wire.wire import Array
from hetpipe.worker.beside import Beside
from hetpipe.worker.bind import Key
from hetpipe.worker.blame import failing_method, summary, trace_of
from hetpipe.worker.copying import Copying
from hetpipe.worker.divided import find_refusals
from hetpipe.worker.emulation import Emulation
from hetpipe.worker.exchange import Exchange
from hetpipe.worker.lanes import HandOver, Sums
from hetpipe.worker.runner import LateFeeds, Runner, Script
from hetpipe.worker.sources import leaves_of
from hetpipe.worker.stage import Stage
from hetpipe.worker.updates import MiniBatches, Updates


class Service:
    """One worker. `serve` runs on the compute thread; another thread calls `deliver`."""

    def __init__(
        self,
        order: say.Open,
        answer: Callable[[Any], None],
        opener: Callable[[str], Device] = open_device,
        send_beside: Callable[[Any], None] | None = None,
    ) -> None:
        """`answer` gets messages to the controller, in order; `send_beside` gets pieces of copies,
        and may wait."""
        self._order = order
        self._answer = answer
        self._send_beside = send_beside or answer
        self._opener = opener
        self._emulation = Emulation(order.member.speed)
        self._inbox: SimpleQueue[tuple[Any, Sequence[int]]] = SimpleQueue()
        self._task = "start"
        self._asked: Any = None  # the latest `Load`, until `Begin`
        self._edge_ends: tuple[EdgeEnd, ...] = ()  # for the next `Begin`
        self._edge_fds: Sequence[int] = ()
        self._stages: dict[int, Stage] = {}
        self._replicas: dict[int, int] = {}  # by stage
        self._exchange: Exchange | None = None
        self._runner: Runner | None = None
        self._edges: list[Sender | Receiver | HandOver | Sums] = []
        self._scripts: dict[int, tuple[Script, ...]] = {}  # by number; one script per lane
        self._beside = Beside()
        self._copying = Copying(self.fail)
        self._failed = threading.Lock()  # the first failure takes this lock forever
        self._stopped = False

    @property
    def doing(self) -> str:
        """The present action, or command."""
        runner = self._runner
        return (runner.doing if runner is not None else "") or self._task

    def deliver(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Accept a message of the controller; never blocks."""
        if isinstance(message, (say.Scale, say.Feed)):
            self._beside.deliver(message)
        elif isinstance(message, say.Speed):
            self._emulation.speed = message.value
        else:
            self._inbox.put((message, fds))

    def serve(self) -> None:
        """Obey commands until `Stop`; the first error is reported and ends the service."""
        try:
            self._answer(say.Reply(self._open().info))
            self._task = "idle"
            while not isinstance((item := self._inbox.get())[0], say.Stop):
                message, fds = item
                if isinstance(message, Edges):
                    self._edge_ends, self._edge_fds = message.ends, fds
                    continue
                if isinstance(message, Lend):
                    self._copying.take(message, *fds)
                    continue
                if isinstance(message, Copy):
                    self._task = "copy"
                    self._copying.copy(message, self._stages, self._answer, self._send_beside)
                    self._task = "idle"
                    continue
                loads = isinstance(message, (say.Load, say.Begin))
                self._task = "load" if loads else type(message).__name__.lower()
                value = _COMMANDS[type(message)](self, message)
                self._task = "idle"
                self._answer(say.Reply(value))
        except EdgeClosedError:  # this worker was stopped, or has reported a broken edge
            # The other edges stay open, so that only the workers beside a broken edge report it.
            while not isinstance(self._inbox.get()[0], say.Stop):
                pass
        except BaseException as error:
            self.fail(error)
        finally:
            self._close_edges()

    def abort(self) -> None:
        """End the worker from another thread: wake all threads that wait in the worker."""
        self._stopped = True
        self.deliver(say.Stop())
        self._beside.stop()
        self._close_edges()

    def fail(self, error: BaseException) -> None:
        """Report the first error; later errors only follow from the first."""
        if self._stopped or not self._failed.acquire(blocking=False):
            return
        self._answer(say.Failure(self.doing, self._summary(error), trace_of(error)))

    def _edge_failed(self, neighbour: int, error: BaseException) -> None:
        """Report an error of an edge. A broken one is no failure of this worker."""
        if isinstance(error, EdgeClosedError):
            self._answer(Severed(neighbour, str(error)))
        else:
            self.fail(error)

    def _summary(self, error: BaseException) -> str:
        """Return the error in one line.

        An error of the device's code that is not a `HetpipeError` gets the device and the method.
        """
        if isinstance(error, HetpipeError) or not (method := failing_method(error)):
            return summary(error)
        return f"{self._order.member.device} fails in {method}: {summary(error)}"

    def _open(self) -> Device:
        order = self._order
        if order.backend is not None:
            load_reference(order.backend)
        if (options := order.options) is not None:
            backend = order.member.opened_device.partition(":")[0]
            configure_backend(backend, options.values, options.folder)
        self._device = self._opener(order.member.opened_device)
        self._emulation.shares_core = order.shares_core and self._device.info.on_cores
        if (meeting := order.meeting) is not None:
            transport = importlib.import_module(meeting.module)
            transport.join(order.rank, order.world, meeting.address, order.start_timeout_s)
        return self._device

    def _load(self, message: say.Load) -> dict[int, str]:
        """Return the reasons why the device cannot run a stage, by the number of the stage."""
        self._asked = message
        refused = find_refusals(self._device, [load.graphs for load in message.stages])
        return {message.stages[n].graphs.stage: reason for n, reason in refused.items()}

    def _begin(self, command: say.Begin) -> None:
        message, self._asked = self._asked, None
        if not command.loads:
            for fd in self._edge_fds:
                os.close(fd)
            return
        self._close_edges()
        self._runner = None
        self._copying.forget()
        self._scripts.clear()
        held = self._drop_stages(message)
        self._device.trim()
        for load in message.stages:
            n = load.graphs.stage
            meet = partial(self._meet, n) if len(message.shares.weights[n]) > 1 else None
            self._replicas[n] = load.replica
            self._stages[n] = Stage(
                self._device, load.graphs, message.state_init, message.keep, meet,
                # A late gradient that is zero has no buffer; every other value has one.
                {key: held.pop(key) for key in load.held if key in held or key[0] != GRAD},
            )  # fmt: skip
        own = {Replica(*each) for each in self._replicas.items()}
        senders, receivers = open_edges(
            self._edge_ends, self._edge_fds, own, self._device, self._edge_failed
        )
        exchange = Exchange(
            self._stages, self._replicas, message.shares, senders, receivers, self._groups(message)
        )
        self._exchange = exchange
        updates = Updates(
            self._stages, self._replicas, message.shares, exchange, MiniBatches(),
            self._grad_scale, self._clip_factor,
        )  # fmt: skip
        self._runner = Runner(
            exchange, updates, self._answer, self._late_feeds, self._emulation, self.fail
        )
        self._edges = [
            *senders.values(),
            *receivers.values(),
            self._runner.hand_over,
            self._runner.sums,
        ]

    def _groups(self, message: say.Load) -> dict[int, Group]:
        """Join the groups that sum the gradients of this worker's stages."""
        groups = {}
        for n in sorted(self._replicas.keys() & message.groups.keys()):
            size, folder = len(message.shares.weights[n]), Path(message.groups[n])
            group = join_group(self._device, folder, self._replicas[n], size)
            if group is not None:
                groups[n] = group
        return groups

    def _drop_stages(self, message: say.Load) -> dict[Key, Buffer]:
        """Free the stages that do not stay. Return the buffers that new stages take over."""
        keys = {key for load in message.stages for key in load.held}
        held = {
            key: buffer
            for stage in self._stages.values()
            for key, buffer in stage.store.find_buffers(keys).items()
        }
        for n in self._stages.keys() - set(message.stay):
            del self._stages[n], self._replicas[n]
        return held

    def _step(self, message: say.Step) -> Any:
        runner = self._runner
        if runner is None:
            raise HetpipeError("this worker has no stage; load one before a step")
        if message.schedule is not None:
            if len(self._scripts) >= say.SCRIPTS:
                self._scripts.pop(next(iter(self._scripts)))
            self._scripts[message.script] = tuple(
                Script.of(message.schedule, row, self._stages, message.closing)
                for row in message.rows
            )
        batch = message.batch
        if isinstance(batch, say.Batch) and (number := batch.fed):
            message = replace(message, batch=replace(batch, feeds=self._beside.feeds(number)))
        elif isinstance(batch, say.Batch) and (drawn := batch.drawn) is not None:
            feeds = leaves_of(self._device, drawn)
            message = replace(message, batch=replace(batch, feeds=feeds))
        return runner.run(self._scripts[message.script], message)

    def _meet(self, stage: int, terms: list[Array]) -> list[Array]:
        """Sum `terms` over the replicas of a stage, in the middle of a pass."""
        assert self._exchange is not None
        return self._exchange.sum(stage, terms)

    def _grad_scale(self, batch: say.Apply) -> float:
        if batch.grad_scale is not None:
            return batch.grad_scale
        return self._beside.scale(batch.serial, clips=False).value

    def _late_feeds(self, batch: say.Batch) -> LateFeeds:
        return self._beside.scale(batch.serial, clips=False).feeds

    def _clip_factor(self, batch: say.Apply, square: float, culprit: str) -> float:
        self._answer(say.Norm(batch.serial, square, culprit))
        return self._beside.scale(batch.serial, clips=True).value

    def _call(self, message: say.Call) -> Any:
        module, _, name = message.function.partition(":")
        return getattr(importlib.import_module(module), name)(self._device, *message.args)

    def _read(self, message: say.Read) -> Any:
        stage = self._stages[message.stage]
        return {name: stage.get((message.role, name)) for name in message.names}

    def _write(self, message: say.Write) -> None:
        for name, value in message.values.items():
            self._stages[message.stage].put((message.role, name), value)

    def _swap(self, message: say.Swap) -> None:
        for one, other in message.pairs:
            self._stages[message.stage].store.swap(one, other)

    def _close_edges(self) -> None:
        for edge in self._edges:
            edge.close()
        self._edges = []


_COMMANDS: dict[type, Callable[[Service, Any], Any]] = {
    say.Load: Service._load,
    say.Begin: Service._begin,
    say.Step: Service._step,
    say.Call: Service._call,
    say.Read: Service._read,
    say.Write: Service._write,
    say.Swap: Service._swap,
}
