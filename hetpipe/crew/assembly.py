"""Gives each worker its stages, values and wires, and its part of each mini-batch (stations 2 and 3
of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hetpipe.capture.program import (
    BUFFER,
    COUNT,
    INPUT,
    LOSS,
    OUTPUT,
    PARAM,
    Slot,
    StageGraphs,
)  # fmt: skip
from hetpipe.checkpoint.tensors import Outline, Tensors
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.topology import Link
from hetpipe.crew.places import Places, check_fit, some
from hetpipe.crew.request import Request, StepRequest, UpdateRequest
from hetpipe.crew.routing import wires
from hetpipe.errors import HetpipeError
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.lanes import row_workers
from hetpipe.sdk.info import DeviceInfo
from hetpipe.wire.ends import Plug, Route, WireEnd
from hetpipe.wire.messages import Apply, Array, Batch, Feeds
from hetpipe.wire.shares import Drawn, Replica, Shares
from hetpipe.wire.wire import IN_EVAL, Content, forwards_of, streams

PARTS = 16
"""The most pieces in which a message of a streaming member travels."""


class Assembly:
    """Stages that fit together, and the values, wires and feeds that each stage needs.

    `stages[n]` are the replicas of stage n, `sizes` the samples of whole micro-batches.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[StageGraphs]],
        values: Mapping[str, Array] | None,
        shares: Shares,
        sizes: Collection[int] = (),
    ) -> None:
        """Check the stages. If `values` is None, the workers have the values already."""
        self.stages = [list(replicas) for replicas in stages]
        self.shares = shares
        self._wires = wires(self.stages, shares, sizes or _sizes(self.stages))
        self.places = Places([replicas[0] for replicas in self.stages])
        self._feeds = [[_feeds_of(stage) for stage in replicas] for replicas in self.stages]
        for n, replicas in enumerate(self.stages):
            for stage in replicas:
                if stage.stage != n:
                    raise HetpipeError(
                        f"stage {stage.stage} is at place {n} of the list; order the "
                        "stages by number"
                    )
        if values is not None:
            self._check_values(Tensors.of(values).outlines)
        self.reporters = {role: self._reporters(role) for role in (LOSS, COUNT, OUTPUT)}

    @property
    def has_count(self) -> bool:
        """Whether losses are sums, with counts."""
        return self.reporters[COUNT] > 0

    def _reporters(self, role: str) -> int:
        """Return how many reports have the losses, counts or outputs of a mini-batch."""
        reports = 0
        for replicas in self.stages:
            forwards = replicas[0].forwards
            if any(slot.role == role for _, program in forwards for slot in program.outputs):
                reports += 1 if self.shares.in_turn else len(replicas)
        return reports

    def wire_ends(
        self,
        cluster: Cluster,
        members: Sequence[Sequence[str]],
        workers: Mapping[str, int],
        infos: Mapping[str, DeviceInfo],
        route: Callable[[int, int], Route | None],
    ) -> dict[str, list[WireEnd]]:
        """Return each member's ends of all wires; `route` is `Fleet.route`.

        Members whose devices stream send while they compute, so their messages travel in pieces.
        Messages between two accelerators of one backend may go directly from memory to memory. A
        wire between two stages of one member is a single entry, without a plug.
        """
        ends: dict[str, list[WireEnd]] = {member: [] for replicas in members for member in replicas}
        for tag, wire in enumerate(self._wires):
            source, target = (members[n][r] for n, r in (wire.source, wire.target))
            if source == target:
                ends[source].append(WireEnd(wire, None))
                continue
            link = cluster.emulated_link(source, target) or Link()
            ranks = workers[source], workers[target]
            pieces = PARTS if streams(infos[source]) else 1
            one, other = infos[source], infos[target]
            direct = one.backend == other.backend and not (one.on_cores or other.on_cores)
            way = route(*ranks)
            for member, sends in ((source, True), (target, False)):
                plug = Plug(tag, sends, ranks, pieces, direct, way)
                ends[member].append(WireEnd(wire, plug, link))
        return ends

    def feeds_of(self, replica: Replica, request: StepRequest) -> list[dict[str, Array]]:
        """Return, per micro-batch, a replica's rows of the leaves that its stage reads."""
        slots = self._feeds[replica.stage][replica.number]
        own_feeds = []
        for feed, size in zip(request.feeds, request.samples, strict=True):
            lo, hi = self.shares.rows(replica, size)
            slots_read = slots[request.forwards, self.shares.count(replica, size)]
            leaves = {slot.name: feed[slot.name] for slot in slots_read if slot.name in feed}
            rows = leaves if hi - lo == size else {n: leaf[lo:hi] for n, leaf in leaves.items()}
            own_feeds.append({name: np.asarray(leaf, order="C") for name, leaf in rows.items()})
        return own_feeds

    def feeds(self, request: StepRequest, own: Sequence[Replica]) -> Feeds:
        """Return the leaves that these replicas read."""
        return {replica.stage: self.feeds_of(replica, request) for replica in own}

    def reads(self, replica: Replica) -> bool:
        """Return whether a replica reads leaves in training."""
        slots = self._feeds[replica.stage][replica.number]
        return any(own for (content, _), own in slots.items() if content is Content.FORWARD)

    def drawn(self, request: StepRequest, own: Sequence[Replica]) -> Drawn:
        """Return the rows that these replicas read from the workers' source."""
        parts: dict[int, list[tuple[tuple[str, ...], int, int]]] = {}
        for replica in own:
            slots, begin = self._feeds[replica.stage][replica.number], 0
            for size in request.samples:
                lo, hi = self.shares.rows(replica, size)
                read = slots[request.forwards, self.shares.count(replica, size)]
                part = tuple(slot.name for slot in read), begin + lo, begin + hi
                parts.setdefault(replica.stage, []).append(part)
                begin += size
        return Drawn(request.source, parts)

    def late_feeds(
        self, own: Sequence[Replica], request: StepRequest | None
    ) -> dict[int, list[dict[str, Array]]]:
        """Return the leaves for backwards of the last stage, if it has one of these replicas."""
        if request is None:
            return {}
        last = len(self.stages) - 1
        return {r.stage: self.feeds_of(r, request) for r in own if r.stage == last}

    def batch(
        self, request: Request, serial: int, own: Sequence[Replica], fed: bool = False
    ) -> Apply:
        """Return a worker's part of a request; `own` are the worker's replicas that take part.

        If the worker is `fed`, it has got the leaves already.
        """
        if isinstance(request, UpdateRequest):
            return Apply(serial, request.number, request.rates, request.grad_scale, request.clip)
        none = (0,) * len(request.samples)
        return Batch(
            serial=serial,
            number=request.number,
            rates=request.rates,
            grad_scale=None if request.guards else request.grad_scale,
            clip=request.clip,
            samples=request.samples,
            feeds={} if fed or request.source else self.feeds(request, own),
            loss_tangents=request.loss_tangents,
            seed=request.seed,
            guards=request.guards,
            counted=self.has_count or request.whole_loss is not None,
            awaits=request.whole_loss is not None and request.forwards is Content.FORWARD,
            lag={n: request.lag.get(n, none) for n, _ in own},
            ahead={n: request.ahead.get(n, none) for n, _ in own},
            fed=request.fed if fed else 0,
            drawn=self.drawn(request, own) if request.source else None,
        )

    @staticmethod
    def check_rows(schedule: Schedule, rows: int) -> None:
        """Raise `HetpipeError` unless a schedule is for as many workers as there are `rows`."""
        workers = len(set(row_workers(schedule)))
        if workers != rows:
            raise HetpipeError(
                f"the schedule is for {workers} workers, but the stages are loaded on {rows}"
            )

    def check(self, request: StepRequest) -> None:
        """Raise `HetpipeError` if a mini-batch does not fit the stages."""
        samples, feeds, loss_tangents = request.samples, request.feeds, request.loss_tangents
        if not len(samples) == len(feeds) == len(loss_tangents):
            raise HetpipeError(
                f"{len(samples)} micro-batches, but {len(feeds)} feeds and "
                f"{len(loss_tangents)} loss tangents"
            )
        for n, replicas in enumerate(self._feeds):
            for replica, slots in enumerate(replicas):
                for m, size in enumerate(samples):
                    lo, hi = self.shares.rows(Replica(n, replica), size)
                    count = self.shares.count(Replica(n, replica), size)
                    if (request.forwards, count) not in slots:
                        present = [str(rows) for of, rows in slots if of is request.forwards]
                        raise HetpipeError(
                            f"micro-batch {m} has {count} samples for a replica of stage {n}, "
                            f"which has programs for {', '.join(present) or 'no'} samples"
                        )
                    for slot in slots[request.forwards, count] if not request.source else ():
                        _check_feed(m, slot, feeds[m], lo, hi, size)

    def _check_values(self, outlines: Mapping[str, Outline]) -> None:
        for n, slots in enumerate(self.places.slots):
            for slot in slots.values():
                if slot.role not in (PARAM, BUFFER):
                    continue
                if slot.name not in outlines:
                    raise HetpipeError(f"stage {n} needs {slot.role} {slot.name!r}: no value given")
                check_fit(slot, outlines[slot.name])


def _sizes(stages: Sequence[Sequence[StageGraphs]]) -> set[int]:
    """Return the sizes of micro-batches for which stages without replicas have programs."""
    alone = [stage for replicas in stages if len(replicas) == 1 for stage in replicas]
    return {
        size for stage in alone for size in (*stage.passes, *stage.evaluation, *stage.inference)
    }


def _feeds_of(stage: StageGraphs) -> dict[tuple[Content, int], list[Slot]]:
    """Return the leaves that a stage reads, by the content of forwards and number of samples."""
    found: dict[tuple[Content, int], dict[str, Slot]] = {}
    programs = [
        (content, samples, program)
        for content in IN_EVAL
        for samples, program in forwards_of(stage, content).items()
    ]
    for samples, passes in stage.passes.items():
        both = (passes.forward, passes.backward)
        programs += [(Content.FORWARD, samples, p) for p in both if p is not None]
    for content, samples, program in programs:
        slots = {slot.name: slot for slot in program.inputs if slot.role == INPUT}
        found.setdefault((content, samples), {}).update(slots)
    return {key: list(slots.values()) for key, slots in found.items()}


def _check_feed(
    microbatch: int, slot: Slot, feed: Mapping[str, Any], lo: int, hi: int, samples: int
) -> None:
    if slot.name not in feed:
        raise HetpipeError(f"micro-batch {microbatch} lacks {slot.name!r}; it has {some(feed)}")
    leaf = feed[slot.name]
    try:
        check_fit(slot, leaf[lo:hi] if leaf.shape[:1] == (int(samples),) else leaf)
    except HetpipeError as error:
        raise HetpipeError(f"micro-batch {microbatch}: {error}") from None
