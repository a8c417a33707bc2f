"""Lets the stages of a worker send, receive and sum tensors (stations 6, 8 and 12 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain, count, takewhile
from typing import Any

import numpy as np

from hetpipe.capture.program import Slot
from hetpipe.schedule.action import Action, Message, Op
from hetpipe.sdk.backend import Buffer, Chunk, Event, Group
from hetpipe.wire.edges import Receiver, Sender, Span
from hetpipe.wire.row_messages import Route, cut, join, kind_of, routes
from hetpipe.wire.shares import Replica, Shares
from hetpipe.wire.transport import Tensor, to_device
from hetpipe.wire.wire import GRADIENTS, Array, Content, Kind, Layout, Leaving, pieces_of
from hetpipe.worker.bind import Key
from hetpipe.worker.divided import Within
from hetpipe.worker.group_sums import GroupSums
from hetpipe.worker.lanes import Waits
from hetpipe.worker.stage import Stage

Edge = tuple[Replica, Replica]
"""Source and target."""


class Routes:
    """The routes over a worker's edges. `numbers[n]` is the worker's replica of stage n."""

    def __init__(
        self,
        numbers: Mapping[int, int],
        shares: Shares,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
    ) -> None:
        self.own = {stage: Replica(stage, number) for stage, number in numbers.items()}
        self._shares = shares
        self._senders, self._receivers = senders, receivers
        self._routes: dict[tuple[Replica, int, Kind, bool], list[Route]] = {}

    def fellows(self, stage: int) -> list[Replica]:
        """Return the other replicas of a stage."""
        this = self.own[stage]
        return [replica for replica in self._shares.replicas(stage) if replica != this]

    def among(self, stage: int, kind: Kind) -> Layout:
        """Return the layout of the messages of a kind between a stage's replicas; () if none."""
        fellows = self.fellows(stage)
        sender = self._senders.get((self.own[stage], fellows[0])) if fellows else None
        return (sender.layout(kind) or ()) if sender is not None else ()

    def of(self, action: Action, message: Message, kind: Kind, mini_batch: int) -> list[Route]:
        """Return the routes of an action's message; `kind` is for the whole micro-batch."""
        sends = action.op.is_send
        key = self.own[action.stage], message.target if sends else message.source, kind, sends
        between = self._routes.get(key)
        if between is None:
            between = self._routes[key] = self._find(*key)
        return [route for route in between if self._shares.takes(route.peer, mini_batch)]

    def meet(self, source: Replica, target: Replica, mini_batch: int) -> bool:
        """Return whether the source takes the mini-batch, and the target takes it too or is a
        replica of the same stage."""
        applies = source.stage == target.stage or self._shares.takes(target, mini_batch)
        return self._shares.takes(source, mini_batch) and applies

    def kind_between(self, kind: Kind, source: Replica, target: Replica) -> Kind:
        """Return the kind of a message between two replicas; `kind` is for whole micro-batches."""
        if kind.content.stays_on_host:
            return kind
        rows = (self._shares.rows(end, kind.number) for end in (source, target))
        return kind_of(kind.content, kind.number, *rows)

    def layout(self, own: Replica, route: Route, sends: bool) -> Layout | None:
        """Return the layout of a route's messages; None if no message travels there."""
        edge: Sender | Receiver | None
        if sends:
            edge = self._senders.get((own, route.peer))
        else:
            edge = self._receivers.get((route.peer, own))
        return None if edge is None else edge.layout(route.kind)

    def _find(self, own: Replica, peer: int, kind: Kind, sends: bool) -> list[Route]:
        if not kind.content.is_tied:
            candidates = routes(self._shares, own, peer, kind.content, kind.number)
        elif sends and own.number > 0:
            candidates = []  # only the first replica sends, since all values are equal
        else:
            replicas = self._shares.replicas(peer)
            peers = replicas if sends else replicas[:1]
            candidates = [Route(replica, (0, 0), kind) for replica in peers]
        return [route for route in candidates if self.layout(own, route, sends) is not None]


Expected = tuple[Action, int | None, Kind, int]
"""A receiving action, then the sending stage (None: the same stage), the kind, the mini-batch."""


class Exchange:
    """A worker's edges, for its stages. `numbers[n]` is the worker's replica of stage n.

    `groups[n]`, if there is one, sums the gradients of stage n.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        numbers: Mapping[int, int],
        shares: Shares,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
        groups: Mapping[int, Group],
    ) -> None:
        self._stages = stages
        self._groups = GroupSums(groups)
        self._shares = shares
        self._senders, self._receivers = senders, receivers
        self._routes = Routes(numbers, shares, senders, receivers)
        self._left: set[Action] = set()  # send actions that began during a pass
        # Gradients kept aside, by (stage, mini-batch).
        self._aside: dict[tuple[int, int], dict[Key, Array]] = {}
        self._kinds_within: dict[tuple[int, str], list[Kind]] = {}  # by stage and letter of a pass
        self._within: dict[int, deque[tuple[Action, Kind]]] = {n: deque() for n in stages}
        self.waited_s = 0.0  # in exchanges within passes
        self.waits = Waits()
        self.streams = any(sender.streams for sender in senders.values())

    def expect(self, messages: Sequence[Expected]) -> None:
        """Tell the receivers which messages will come, each sending stage's messages in order."""
        routes = self._routes
        messages = [
            m for m in messages if m[0].op is not Op.ALL_REDUCE or self._groups.is_on_host(m[0])
        ]
        for action, _, kind, _ in messages:
            if isinstance(action, Within):
                self._within[action.stage].append((action, kind))
        for (source, target), receiver in self._receivers.items():
            order = []
            for action, stage, kind, mini_batch in messages:
                ends = (action.stage if stage is None else stage, action.stage)
                if ends != (source.stage, target.stage):
                    continue
                if stage is not None and not routes.meet(source, target, mini_batch):
                    continue
                between = routes.kind_between(kind, source, target)
                if receiver.layout(between) is not None:
                    order.append((action, between))
            receiver.expect(order)

    def transfer(self, action: Action, message: Message, kind: Kind, mini_batch: int) -> None:
        """Send or receive an action's message; `kind` is for the whole micro-batch."""
        routes = self._routes.of(action, message, kind, mini_batch)
        if action.op.is_send:
            self._send(action, message, kind, routes)
        else:
            self._receive(action, message, kind, routes)

    def leaving(
        self, send: Action, message: Message, kind: Kind, mini_batch: int
    ) -> Leaving | None:
        """Return a function that sends a pass's outputs while the pass runs; None if the outputs
        must leave whole."""
        routes = self._routes.of(send, message, kind, mini_batch)
        if len(routes) != 1 or routes[0].kind != kind:
            return None
        sender = self._senders[self._routes.own[send.stage], routes[0].peer]
        layout = sender.layout(kind)
        if not sender.streams or layout is None:
            return None

        def leave(
            slots: Sequence[Slot], outputs: Sequence[Buffer], end: Event, chunks: Sequence[Chunk]
        ) -> None:
            pieces = pieces_of(layout, slots, outputs, end, chunks)
            if pieces is not None:
                self._left.add(send)
                sender.stream(send, kind, pieces)

        return leave

    def all_reduce(self, action: Action, scale: float = 1.0) -> None:
        """Multiply the gradients by `scale`, and sum the products over the replicas. All replicas
        add in the same order, so all sums are equal."""
        n = action.stage
        stage, layout = self._stages[n], self._routes.among(n, GRADIENTS)
        if not layout:
            return
        addends: list[tuple[Array, ...]] = []
        if self._groups.is_on_host(action):
            terms = [stage.get(slot.key) for slot in layout]
            if scale != 1.0:
                terms = [array * array.dtype.type(scale) for array in terms]
            addends = self._addends(n, action, GRADIENTS, terms)
        if self._groups.group(n) is not None:
            self._groups.sum(action, stage, layout, scale, addends)
            return
        for slot, total in zip(layout, map(_add, addends), strict=True):
            stage.put(slot.key, total)

    def pass_gradients(self, action: Action) -> None:
        """Send a mini-batch's gradients to the other replicas, or receive gradients from a replica.

        Sent gradients are kept aside for their update. Received gradients overwrite the
        accumulators, whose earlier gradients are kept aside or have been applied.
        """
        n = action.stage
        stage, layout = self._stages[n], self._routes.among(n, GRADIENTS)
        own, fellows = self._routes.own[n], self._routes.fellows(n)
        if not layout:
            return
        if action.op is Op.SEND_GRAD:
            gradients = {slot.key: stage.get(slot.key) for slot in layout}
            for fellow in fellows:
                self._senders[own, fellow].send(action, GRADIENTS, [*gradients.values()])
            self._aside[n, action.number] = gradients
        else:
            (owner,) = (peer for peer in fellows if self._shares.takes(peer, action.number))
            for slot, array in zip(layout, self._receivers[owner, own].take(action), strict=True):
                stage.put(slot.key, array)

    def take_back(self, update: Action) -> None:
        """Put the gradients that were kept aside for an update into the accumulators."""
        for key, array in self._aside.pop((update.stage, update.number), {}).items():
            self._stages[update.stage].put(key, array)

    def within(self, action: Action, letter: str) -> list[Expected]:
        """Return entries for `expect`: the sums over replicas in a pass of operation `letter`."""
        n, op, number = action.stage, action.op, action.number
        kinds = self._kinds_within.get((n, letter))
        if kinds is None:
            all_kinds = (Kind(Content.sum_in(letter), place) for place in count())
            kinds = [*takewhile(lambda kind: self._routes.among(n, kind), all_kinds)]
            self._kinds_within[n, letter] = kinds
        return [(Within(n, op, number, kind.number), None, kind, number) for kind in kinds]

    def sum(self, n: int, terms: list[Array]) -> list[Array]:
        """Make the next exchange within a pass of stage `n`: sum the terms over the replicas."""
        action, kind = self._within[n].popleft()
        start_s = time.monotonic()
        with self.waits.at(n):
            sums = [*map(_add, self._addends(n, action, kind, terms))]
        self.waited_s += time.monotonic() - start_s
        return sums

    def drain(self) -> None:
        """Wait until all messages have left."""
        for sender in self._senders.values():
            sender.drain()

    def take_spans(self) -> list[Span]:
        """Return the spans of the messages sent and received since the last call."""
        edges = chain[Sender | Receiver](self._senders.values(), self._receivers.values())
        spans = (span for edge in edges for span in edge.take_spans())
        # The spans of passes include the exchanges within them.
        return [span for span in spans if not isinstance(span[0], Within)]

    def _addends(
        self, n: int, action: Action, kind: Kind, terms: list[Array]
    ) -> list[tuple[Array, ...]]:
        """Send the terms to all other replicas. Return all terms of each sum, by replica."""
        own, fellows = self._routes.own[n], self._routes.fellows(n)
        for fellow in fellows:
            self._senders[own, fellow].send(action, kind, terms)
        by_replica = {peer: self._receivers[peer, own].take(action) for peer in fellows}
        by_replica[own] = terms
        in_order = [by_replica[replica] for replica in sorted(by_replica)]
        return [*zip(*in_order, strict=True)]

    def _send(self, action: Action, message: Message, kind: Kind, routes: Sequence[Route]) -> None:
        own = self._routes.own[action.stage]
        whole: Sequence[Tensor] | None = None
        for route in routes:
            layout = self._routes.layout(own, route, sends=True)
            assert layout is not None
            if whole is None:
                whole = self._outgoing(own, message, kind, layout)
            tensors = whole
            if route.kind.content.has_some_rows:
                whole = arrays = self._stages[own.stage].on_host(whole)
                first, _ = self._shares.rows(own, kind.number)
                lo, hi = (row - first for row in route.rows)
                tensors = cut(arrays, layout, self._senders[own, route.peer].axes, lo, hi)
            if action in self._left:
                self._left.remove(action)
            else:
                self._senders[own, route.peer].send(action, route.kind, tensors)

    def _receive(
        self, action: Action, message: Message, kind: Kind, routes: Sequence[Route]
    ) -> None:
        own = self._routes.own[action.stage]
        received = [self._receivers[route.peer, own].take(action) for route in routes]
        if not received:
            return
        tensors, layout = received[0], self._routes.layout(own, routes[0], sends=False)
        assert layout is not None
        if routes[0].kind.content.has_some_rows:
            axes = self._receivers[routes[0].peer, own].axes
            parts = [(r.rows, arrays) for r, arrays in zip(routes, received, strict=True)]
            joined = join(parts, layout, axes, self._shares.rows(own, kind.number))
            tensors = to_device(self._stages[own.stage].device, joined)
        self._store_received(own.stage, message, kind, layout, tensors)

    def _outgoing(
        self, own: Replica, message: Message, kind: Kind, layout: Layout
    ) -> Sequence[Tensor]:
        stage = self._stages[own.stage]
        if kind.content.is_tied:
            # The next update overwrites tied tensors, so download them before the next action.
            version = stage.loans.chosen(message.number)
            return [stage.store.get(slot.key, version) for slot in layout]
        rows = self._shares.count(own, kind.number)
        return stage.frames.depart(message.number, rows, layout)

    def _store_received(
        self, n: int, message: Message, kind: Kind, layout: Layout, tensors: list[Any]
    ) -> None:
        stage = self._stages[n]
        if kind.content is Content.TIED_GRAD:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, stage.get(slot.key) + array)
        elif kind.content.is_tied:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, array)
        else:
            stage.frames.arrive(message.number, layout, tensors)


def _add(addends: Sequence[Array]) -> Array:
    return np.asarray(reduce(np.add, addends))
