"""Finds the replicas that exchange a message with this worker, and the kind on each edge."""

from __future__ import annotations

from collections.abc import Mapping

from hetpipe.schedule.action import Action, Message
from hetpipe.wire.edges import Receiver, Sender
from hetpipe.wire.row_messages import Route, kind_of, routes
from hetpipe.wire.shares import Replica, Shares
from hetpipe.wire.wire import Kind, Layout

Edge = tuple[Replica, Replica]
"""Source and target."""


class Routes:
    """The routes over a worker's edges. `numbers[n]` is its replica of stage n."""

    def __init__(
        self,
        numbers: Mapping[int, int],
        shares: Shares,
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
    ) -> None:
        self._numbers = numbers
        self._shares = shares
        self._senders, self._receivers = senders, receivers
        self._routes: dict[tuple[Replica, int, Kind, bool], list[Route]] = {}

    def own(self, stage: int) -> Replica:
        """Return the worker's replica of a stage."""
        return Replica(stage, self._numbers[stage])

    def fellows(self, stage: int) -> list[Replica]:
        """Return the other replicas of a stage."""
        this = self.own(stage)
        return [replica for replica in self._shares.replicas(stage) if replica != this]

    def among(self, stage: int, kind: Kind) -> Layout:
        """Return the tensors that a stage's replicas send each other in messages of a kind."""
        fellows = self.fellows(stage)
        sender = self._senders.get((self.own(stage), fellows[0])) if fellows else None
        return (sender.layout(kind) or ()) if sender is not None else ()

    def of(self, action: Action, message: Message, kind: Kind, mini_batch: int) -> list[Route]:
        """Return the routes of a whole micro-batch's message."""
        sends = action.op.is_send
        key = self.own(action.stage), message.target if sends else message.source, kind, sends
        between = self._routes.get(key)
        if between is None:
            between = self._routes[key] = self._find(*key)
        return [route for route in between if self._shares.takes(route.peer, mini_batch)]

    def meet(self, source: Replica, target: Replica, mini_batch: int) -> bool:
        """Return whether both replicas take a mini-batch, or one takes it and its fellow applies
        it."""
        applies = source.stage == target.stage or self._shares.takes(target, mini_batch)
        return self._shares.takes(source, mini_batch) and applies

    def kind_between(self, kind: Kind, source: Replica, target: Replica) -> Kind:
        """Return the kind of a whole micro-batch's message between two replicas."""
        if kind.content.stays_on_host:
            return kind
        rows = (self._shares.rows(end, kind.number) for end in (source, target))
        return kind_of(kind.content, *rows)

    def layout(self, own: Replica, route: Route, sends: bool) -> Layout | None:
        """Return the tensors that travel over a route; None if no message does."""
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
