"""A walk through a plain schedule: follows the simulator's rules without a clock.

A step begins when the previous step of its row has ended, and the message that the step receives
has arrived. The message that the step sends leaves when its edge is free. So the walk can compute
the times of one step after another, in the order of `hetpipe.schedule.order`.

This order depends only on the schedule, not on times. So planners that price many plans keep the
order (`order_of`), and need one walk for each price.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hetpipe.schedule.action import Schedule
from hetpipe.schedule.codes import RECEIVE, SEND
from hetpipe.schedule.columns import columns_of
from hetpipe.schedule.complete import Pair, complete_passes
from hetpipe.schedule.lanes import laned_stages
from hetpipe.schedule.order import Order
from hetpipe.schedule.rule import Rule
from hetpipe.simulate.timeline import SpanColumns
from hetpipe.simulate.times import FREE, StageTimes


class Moments(NamedTuple):
    """When the computation of each step ends, and when its message leaves and arrives.

    The steps are in the order of `Order`. A step that sends nothing has a message that takes no
    time. The arrivals begin with an additional 0, for steps that receive nothing.
    """

    ends_s: list[float]
    leaves_s: list[float]
    arrivals_s: list[float]


def walk(schedule: Schedule, times: StageTimes) -> SpanColumns | None:
    """Return the spans of all actions; None if the schedule needs the clock, or deadlocks."""
    columns = columns_of(schedule)
    order = columns.order
    if order is None:
        return None
    moments = moments_of(order, times)
    arrivals_s = np.array(moments.arrivals_s)
    received_s, ends_s, leaves_s, sent_s = np.empty((4, len(order.rows)))
    received_s[order.places] = arrivals_s[order.awaited]
    ends_s[order.places] = moments.ends_s
    leaves_s[order.places] = moments.leaves_s
    sent_s[order.places] = arrivals_s[1:]
    asks_s = np.concatenate(([0.0], ends_s[:-1]))  # when the row's previous step ends
    asks_s[order.step_of[(columns.ends - columns.lengths)[columns.lengths > 0]]] = 0.0
    begins_s = np.maximum(asks_s, received_s)
    of_role = [order.roles == RECEIVE, order.roles == SEND]
    starts_s, stops_s = (
        np.select(of_role, [receive_s[order.step_of], send_s[order.step_of]], pass_s[order.step_of])
        for receive_s, send_s, pass_s in ((asks_s, leaves_s, begins_s), (begins_s, sent_s, ends_s))
    )
    return SpanColumns(columns, starts_s, stops_s)


def moments_of(order: Order, times: StageTimes) -> Moments:
    """Return the moments of all steps. No messages may share a medium."""
    if max(times.chunks, default=1) > 1:
        return _with_chunks(order, times)
    works_s = [0.0, *map(times.compute_s, order.passes)]
    transfers = [FREE] * order.row_count + [*map(times.transfer, order.messages)]
    latencies_s, occupancies_s, _ = zip(*transfers, strict=True)
    rows_s, edges_s = [0.0] * order.row_count, [0.0] * len(order.edges)
    moments, edges = Moments([], [], [0.0]), order.edges
    ends_s, leaves_s, arrivals_s = moments
    add_end, add_leave, add_arrival = ends_s.append, leaves_s.append, arrivals_s.append
    steps = zip(order.rows, order.awaited, order.computed, order.ways, strict=True)
    for row, awaited, computed, way in steps:
        now_s, received_s = rows_s[row], arrivals_s[awaited]
        if received_s > now_s:
            now_s = received_s
        rows_s[row] = now_s = now_s + works_s[computed]
        add_end(now_s)
        edge = edges[way]
        free_s = edges_s[edge]
        if free_s > now_s:
            now_s = free_s
        add_leave(now_s)
        edges_s[edge] = now_s = now_s + occupancies_s[way]
        add_arrival(now_s + latencies_s[way])
    return moments


def _with_chunks(order: Order, times: StageTimes) -> Moments:
    """Return the moments if a message may leave in chunks while its pass still computes.

    A message holds its edge from its first chunk until its last chunk has left.
    """
    works_s = [0.0, *map(times.compute_s, order.passes)]
    chunks = [1.0, *(times.chunks[action.stage] for action in order.passes)]
    transfers = [FREE] * order.row_count + [*map(times.transfer, order.messages)]
    rows_s, edges_s = [0.0] * order.row_count, [0.0] * len(order.edges)
    moments = Moments([], [], [0.0])
    edges, arrivals_s = order.edges, moments.arrivals_s
    add_end, add_leave = moments.ends_s.append, moments.leaves_s.append
    steps = zip(
        order.rows, order.awaited, order.computed, order.ways, order.streams, strict=True
    )  # fmt: skip
    for row, awaited, computed, way, streams in steps:
        begin_s, arrival_s = rows_s[row], arrivals_s[awaited]
        if arrival_s > begin_s:
            begin_s = arrival_s
        rows_s[row] = end_s = leave_s = begin_s + works_s[computed]
        in_chunks = streams and chunks[computed] > 1
        if in_chunks:
            leave_s = begin_s + works_s[computed] / chunks[computed]
        latency_s, occupancy_s, _ = transfers[way]
        edge = edges[way]
        free_s = edges_s[edge]
        if free_s > leave_s:
            leave_s = free_s
        left_s = leave_s + occupancy_s
        if in_chunks:
            left_s = max(left_s, end_s + occupancy_s / chunks[computed])
        edges_s[edge] = left_s
        add_end(end_s)
        add_leave(leave_s)
        arrivals_s.append(left_s + latency_s)
    return moments


KEPT = 256  # number of remembered orders, the most recently used ones


def step_s(order: Order, times: StageTimes) -> float:
    """Return the seconds of a mini-batch, without the controller's overhead."""
    return max(moments_of(order, times).arrivals_s)


@lru_cache(KEPT)
def order_of(
    rule: Rule,
    stages: int,
    microbatches: int,
    in_flight: tuple[int, ...],
    workers: int,
    pairs: tuple[Pair, ...] = (),
) -> Order | None:
    """Return the order of the steps under a rule; None if only `simulate` can tell it.

    A faulty schedule has no order either. `pairs` are stages that share parameters. Raises
    `ScheduleError` if the rule does.
    """
    if not rule.flushes:
        return None
    passes = columns_of(rule.rows(stages, microbatches, in_flight, workers))
    if laned_stages(passes):
        return None
    return complete_passes(passes, stages, pairs, ()).order
