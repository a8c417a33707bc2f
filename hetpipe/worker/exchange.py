"""Exchange: what the stages of a worker send to others, receive from them and sum with them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain, count, repeat, takewhile
from typing import Any

import numpy as np

from hetpipe.capture.program import Slot
from hetpipe.schedule.action import Action, Message, Op
from hetpipe.sdk.backend import Buffer, Chunk, Event
from hetpipe.wire.edges import Receiver, Sender, Span
from hetpipe.wire.pieces import Leaving, pieces_of
from hetpipe.wire.rows import Route, cut, join, kind_of, routes
from hetpipe.wire.shares import Place, Shares
from hetpipe.wire.transport import Tensor, to_device
from hetpipe.wire.wire import ALL_REDUCE, ROWS, SUMS, TIED, TIED_GRAD, Array, Kind, Layout
from hetpipe.worker.bind import Key
from hetpipe.worker.divided import Within
from hetpipe.worker.stage import Stage

Edge = tuple[Place, Place]
"""Source and target."""

Expected = tuple[Action, int | None, Kind, int]
"""A receiving action, the stage that sends (None: its own), kind and mini-batch."""


class Exchange:
    """The edges of a worker. `replicas` says which replica of its stages it is."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: Mapping[int, int],
        shares: Shares,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
    ) -> None:
        self._stages = stages
        self._replicas = replicas
        self._shares = shares
        self._senders = senders
        self._receivers = receivers
        self._routes: dict[tuple[Place, int, Kind, bool], list[Route]] = {}
        self._left: set[Action] = set()  # sends that began with their passes
        self._aside: dict[tuple[int, int], dict[Key, Array]] = {}  # gradients, (stage, mini-batch)
        self._kinds_within: dict[tuple[int, str], list[Kind]] = {}  # by stage and letter of a pass
        self._within: dict[int, deque[tuple[Action, Kind]]] = {n: deque() for n in stages}
        self.waited_s = 0.0
        """In exchanges within passes, so far."""
        self.streams = any(sender.streams for sender in senders.values())

    def expect(self, messages: Sequence[Expected]) -> None:
        """What will come, in the order in which each stage sends it."""
        for action, _, kind, _ in messages:
            if isinstance(action, Within):
                self._within[action.stage].append((action, kind))
        for (source, target), receiver in self._receivers.items():
            order = []
            for action, stage, kind, mini_batch in messages:
                ends = (action.stage if stage is None else stage, action.stage)
                if ends != (source[0], target[0]):
                    continue
                if stage is not None and not self._meet(source, target, mini_batch):
                    continue
                each = self._kind(kind, source, target)
                if receiver.layout(each) is not None:
                    order.append((action, each))
            receiver.expect(order)

    def transfer(self, action: Action, message: Message, kind: Kind, mini_batch: int) -> None:
        """Send, or receive, a message of a whole micro-batch: to, or from, all whom it concerns."""
        own, found = self._with(action, message, kind, mini_batch)
        if action.op.is_send:
            self._send(action, message, own, kind, found)
        else:
            self._receive(action, message, own, kind, found)

    def leaving(
        self, send: Action, message: Message, kind: Kind, mini_batch: int
    ) -> Leaving | None:
        """What sends a pass's outputs while it runs; None if they cannot leave in pieces."""
        own, found = self._with(send, message, kind, mini_batch)
        if len(found) != 1 or found[0].kind != kind:
            return None
        sender = self._senders[own, found[0].peer]
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
        """Sum `scale` times the gradients over the replicas, in their order: all get the same."""
        n, kind = action.stage, (ALL_REDUCE, 0)
        stage, layout = self._stages[n], self._among(n, kind)
        if not layout:
            return
        terms = [stage.get(slot.key) for slot in layout]
        if scale != 1.0:
            terms = [array * array.dtype.type(scale) for array in terms]
        for slot, total in zip(layout, self._summed(n, action, kind, terms), strict=True):
            stage.put(slot.key, total)

    def pass_gradients(self, action: Action) -> None:
        """Send the gradients of a mini-batch to the other replicas, and keep them for its update;
        or receive those of another's into the accumulators, whose own are kept or applied."""
        n, kind = action.stage, (ALL_REDUCE, 0)
        stage, layout = self._stages[n], self._among(n, kind)
        own, peers = self._fellows(n)
        if not layout:
            return
        if action.op is Op.SEND_GRAD:
            found = {slot.key: stage.get(slot.key) for slot in layout}
            for peer in peers:
                self._senders[own, peer].send(action, kind, [*found.values()])
            self._aside[n, action.number] = found
        else:
            (owner,) = (place for place in peers if self._shares.takes(place, action.number))
            for slot, array in zip(layout, self._receivers[owner, own].take(action), strict=True):
                stage.put(slot.key, array)

    def take_back(self, update: Action) -> None:
        """Put what was kept for an update into the accumulators."""
        for key, array in self._aside.pop((update.stage, update.number), {}).items():
            self._stages[update.stage].put(key, array)

    def within(self, action: Action, letter: str) -> list[Expected]:
        """The exchanges within a pass, which is of that letter, as messages that will come."""
        n, op, number = action.stage, action.op, action.number
        kinds = self._kinds_within.get((n, letter))
        if kinds is None:
            all_kinds = zip(repeat(SUMS[letter]), count())
            kinds = [*takewhile(lambda kind: self._among(n, kind), all_kinds)]
            self._kinds_within[n, letter] = kinds
        return [(Within(n, op, number, kind[1]), None, kind, number) for kind in kinds]

    def sum(self, n: int, terms: list[Array]) -> list[Array]:
        """The next exchange within a pass of a stage: sums over the replicas, in their order."""
        action, kind = self._within[n].popleft()
        start_s = time.monotonic()
        sums = self._summed(n, action, kind, terms)
        self.waited_s += time.monotonic() - start_s
        return sums

    def drain(self) -> None:
        """Wait until everything has left."""
        for sender in self._senders.values():
            sender.drain()

    def take_spans(self) -> list[Span]:
        """The spans of what was sent and received since the last time."""
        edges = chain[Sender | Receiver](self._senders.values(), self._receivers.values())
        spans = (span for edge in edges for span in edge.take_spans())
        return [span for span in spans if not isinstance(span[0], Within)]  # are in the passes'

    def _fellows(self, n: int) -> tuple[Place, list[Place]]:
        """Which replica of a stage this is, and the others."""
        own = (n, self._replicas[n])
        return own, [place for place in self._shares.places(n) if place != own]

    def _among(self, n: int, kind: Kind) -> Layout:
        """What the replicas of a stage send each other as messages of a kind."""
        own, peers = self._fellows(n)
        sender = self._senders.get((own, peers[0])) if peers else None
        return (sender.layout(kind) or ()) if sender is not None else ()

    def _summed(self, n: int, action: Action, kind: Kind, terms: list[Array]) -> list[Array]:
        """Everyone sends its terms to everyone, and adds them in the order of the replicas."""
        own, peers = self._fellows(n)
        for peer in peers:
            self._senders[own, peer].send(action, kind, terms)
        found = {peer: self._receivers[peer, own].take(action) for peer in peers} | {own: terms}
        replicas = [found[place] for place in sorted(found)]
        return [np.asarray(reduce(np.add, each)) for each in zip(*replicas, strict=True)]

    def _with(
        self, action: Action, message: Message, kind: Kind, mini_batch: int
    ) -> tuple[Place, list[Route]]:
        """Who exchanges a message of a whole micro-batch, and with whom."""
        own, sends = (action.stage, self._replicas[action.stage]), action.op.is_send
        key = (own, message.target if sends else message.source, kind, sends)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._find(*key)
        return own, [route for route in found if self._shares.takes(route.peer, mini_batch)]

    def _meet(self, source: Place, target: Place, mini_batch: int) -> bool:
        """Both take it; or it is taken by the one and applied by the other replica of a stage."""
        applies = source[0] == target[0] or self._shares.takes(target, mini_batch)
        return self._shares.takes(source, mini_batch) and applies

    def _kind(self, kind: Kind, source: Place, target: Place) -> Kind:
        """What a message of a whole micro-batch is between two replicas."""
        letter, samples = kind
        if letter in TIED or letter == ALL_REDUCE or letter in SUMS.values():
            return kind
        return kind_of(
            letter, self._shares.rows(source, samples), self._shares.rows(target, samples)
        )

    def _find(self, own: Place, peer: int, kind: Kind, sends: bool) -> list[Route]:
        """With whom to exchange such a message, and as what."""
        letter, samples = kind
        if letter not in TIED:
            found = routes(self._shares, own, peer, letter, samples)
        elif sends and own[1] > 0:
            found = []  # the first replica has what they all have
        else:
            places = self._shares.places(peer)
            found = [Route(place, (0, 0), kind) for place in (places if sends else places[:1])]
        return [route for route in found if self._layout(own, route, sends) is not None]

    def _layout(self, own: Place, route: Route, sends: bool) -> Layout | None:
        edge: Sender | Receiver | None
        if sends:
            edge = self._senders.get((own, route.peer))
        else:
            edge = self._receivers.get((route.peer, own))
        return None if edge is None else edge.layout(route.kind)

    def _send(
        self, action: Action, message: Message, own: Place, kind: Kind, found: Sequence[Route]
    ) -> None:
        whole: Sequence[Tensor] | None = None
        for route in found:
            layout = self._layout(own, route, sends=True)
            assert layout is not None
            if whole is None:
                whole = self._outgoing(own, message, kind, layout)
            tensors = whole
            if route.kind[0] in ROWS.values():
                whole = arrays = self._stages[own[0]].on_host(whole)
                first, _ = self._shares.rows(own, kind[1])
                lo, hi = (row - first for row in route.rows)
                tensors = cut(arrays, layout, self._senders[own, route.peer].axes, lo, hi)
            if action in self._left:
                self._left.remove(action)
            else:
                self._senders[own, route.peer].send(action, route.kind, tensors)

    def _receive(
        self, action: Action, message: Message, own: Place, kind: Kind, found: Sequence[Route]
    ) -> None:
        received = [self._receivers[route.peer, own].take(action) for route in found]
        if not received:
            return
        tensors, layout = received[0], self._layout(own, found[0], sends=False)
        assert layout is not None
        if found[0].kind[0] in ROWS.values():
            axes = self._receivers[found[0].peer, own].axes
            parts = [(r.rows, arrays) for r, arrays in zip(found, received, strict=True)]
            joined = join(parts, layout, axes, self._shares.rows(own, kind[1]))
            tensors = to_device(self._stages[own[0]].device, joined)
        self._arrived(own[0], message, layout, tensors)

    def _outgoing(
        self, own: Place, message: Message, kind: Kind, layout: Layout
    ) -> Sequence[Tensor]:
        stage = self._stages[own[0]]
        if message.kind in TIED:
            # The next update overwrites them: they leave the device before the list goes on.
            return [stage.get(slot.key) for slot in layout]
        lo, hi = self._shares.rows(own, kind[1])
        return stage.frames.depart(message.number, hi - lo, layout)

    def _arrived(self, n: int, message: Message, layout: Layout, tensors: list[Any]) -> None:
        stage = self._stages[n]
        if message.kind == TIED_GRAD:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, stage.get(slot.key) + array)
        elif message.kind in TIED:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, array)
        else:
            stage.frames.arrive(message.number, layout, tensors)
