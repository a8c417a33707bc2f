"""Pricing: predicts a plan's passes, transfers, step and timeline from a cost table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.shares import copying_share
from hetpipe.plan.sharing import share_media
from hetpipe.schedule.action import FORWARDS
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import GPIPE, GPIPE_WITH_LOSS, Rule
from hetpipe.sdk.info import is_host_memory
from hetpipe.simulate.simulator import period_s, simulate
from hetpipe.simulate.timeline import Timeline
from hetpipe.simulate.times import FREE, StageTimes, Transfer
from hetpipe.simulate.walk import order_of, step_s

NEAR = 1e-3
"""If the bounds of a stream's period differ by at most this share, the upper bound is the price."""
LONGEST = 256  # longest stream to simulate, as a multiple of the mini-batches in flight
LONG_TURN = 16
"""Replicas take turns in a pattern that repeats after some mini-batches. A pattern of more
mini-batches than this is assumed to repeat with every mini-batch."""

Tied = tuple[tuple[int, tuple[int, ...]], ...]  # stages that share parameters: owner, others


def predict(
    plan: Plan,
    table: CostTable,
    *,
    times: StageTimes | None = None,
    mini_batches: int | None = None,
) -> Timeline:
    """Return the timeline of one step or, without flushes, of `mini_batches`, priced by `table`.

    `mini_batches` is by default a number that fills the pipeline a few times. By default the table
    gives the `times`. A model that only predicts has no backwards and no update.
    """
    times = times or stage_times(plan, table)
    rule, names, count = _rule_of(plan, table), plan.devices, 1
    workers = len(set(names))
    if not rule.flushes:  # the schedule has a row for every replica
        names, count = plan.all_devices, mini_batches or _filling(plan)
    schedule = generate(
        rule, len(plan.stages), plan.microbatches, in_flight=plan.in_flight,
        tied=tied_stages(plan, table), mini_batches=count, workers=workers, replicas=plan.replicas,
    )  # fmt: skip
    if not table.trains and rule.flushes:
        rows = [tuple([a for a in row if a.op in FORWARDS]) for row in schedule]
        schedule = [row for row in rows if row]  # without the lanes of backwards
    return simulate(schedule, times, workers=tuple(dict.fromkeys(names)))


def predicted_step_s(plan: Plan, table: CostTable, times: StageTimes | None = None) -> float:
    """Return the seconds per mini-batch; faster than `predict` where no timeline is needed.

    Without flushes this is the period of an endless stream. By default the table gives the `times`.
    """
    times = times or stage_times(plan, table)
    if not plan.rule.flushes:
        return _stream_step_s(plan, table, times)
    pairs = tuple((owner, o) for owner, others in tied_stages(plan, table) for o in others)
    alone = max(plan.replicas) == 1
    if (
        table.trains
        and not times.shares_media
        and (alone or not (plan.rule.several_stages or pairs))
    ):
        order = order_of(
            _rule_of(plan, table), len(plan.stages), plan.microbatches, plan.in_flight,
            len(set(plan.devices)), pairs,
        )  # fmt: skip
        if order is not None:
            return step_s(order, times if alone else _summed(times)) + times.step_overhead_s
    return predict(plan, table, times=times).total_s


def _rule_of(plan: Plan, table: CostTable) -> Rule:
    """Return the plan's rule, with the wait for a loss over the mini-batch if it has a price."""
    return GPIPE_WITH_LOSS if table.whole_loss and plan.rule == GPIPE else plan.rule


def _stream_step_s(plan: Plan, table: CostTable, times: StageTimes) -> float:
    """Return an upper bound of the stream's period. The simulated stream grows until its bounds
    agree within `NEAR`, or until it is longer than `LONGEST`."""
    turn = math.lcm(*plan.replicas)
    if turn > LONG_TURN:  # a stage's replicas have equal times, so mini-batches differ only in sums
        turn = 1
    reach = _reach(plan)
    rounds = max(4 * -(-reach // turn), -(-_filling(plan) // turn))
    while True:
        timeline = predict(plan, table, times=times, mini_batches=rounds * turn)
        low_s, high_s = period_s(timeline, rounds * turn, turn, reach)
        if high_s - low_s <= NEAR * high_s or rounds * turn > LONGEST * (reach + 1):
            return high_s
        rounds *= 2


def _reach(plan: Plan) -> int:
    """Return the most mini-batches that a stage has in flight, over all its replicas."""
    in_flight = (depth * count for depth, count in zip(plan.in_flight, plan.replicas, strict=True))
    return -(-max(in_flight) // plan.microbatches)


def _filling(plan: Plan) -> int:
    """Return a number of mini-batches that fills the pipeline four times."""
    return 4 * _reach(plan) + 4


def _summed(times: StageTimes) -> StageTimes:
    """Return times in which an update includes its sum over replicas: a worker with one stage and
    without tied parameters does nothing between sum and update."""
    sums = map(times.sum_of, range(len(times.update_s)))
    both_s = zip(times.update_s, sums, strict=True)
    update_s = tuple(s + (each.latency_s + each.occupancy_s) for s, each in both_s)
    return replace(times, update_s=update_s, all_reduce_s=(), sums=())


def tied_stages(plan: Plan, table: CostTable) -> Tied:
    """Return the stages that share trained parameters under the plan's cuts; the lowest is the
    owner."""
    if not table.tied or not table.trains:
        return ()
    groups: set[tuple[int, ...]] = set()
    for shared in table.tied:
        groups.add(tuple(sorted({bisect_right(plan.cuts, layer) for layer in shared.layers})))
    return tuple((group[0], group[1:]) for group in sorted(groups) if len(group) > 1)


def stage_times(
    plan: Plan, table: CostTable, as_planned: bool = False, cluster: Cluster | None = None
) -> StageTimes:
    """Return the times of a plan's stages and links, for a simulation.

    `table` prices transfers and, unless `as_planned`, the passes of stages on one device. All other
    passes have the plan's times, which the slowest replica determines; so have all passes if the
    table has only the rows of a replica. Messages and sums share the media of the table's links and
    of the `cluster` (`hetpipe.plan.sharing`).
    """
    devices, rule = plan.devices, plan.rule
    rows = -(-plan.mini_batch // plan.microbatches)
    as_planned |= max(plan.replicas) > 1 and table.samples != rows
    table = table.beside(len(set(plan.all_devices)))
    forward_s, backward_s, update_s, gradient_links = [], [], [], []
    for stage in plan.stages:
        if as_planned or len(stage.devices) > 1:  # the plan knows the times for a replica's rows
            times_s = stage.forward_s, stage.backward_s, stage.update_s
        else:
            times_s = table.passes_s(stage.devices[0], stage.lo, stage.hi, plan.recompute)
        forward_s.append(times_s[0])
        backward_s.append(times_s[1])
        gradient_links.append(FREE if rule.averages else _gradient_link(table, stage))
        copying_s = 0.0 if rule.averages else _copying_s(table, stage, gradient_links[-1])
        update_s.append(times_s[2] + copying_s)
    ahead_links, back_links = [], []
    for cut, (here, there) in enumerate(pairwise(devices)):
        # Replicas divide a message (DAPPLE); the replica with the most rows takes longest.
        sides = [stage.shares for stage in plan.stages[cut : cut + 2]]
        share = max([max(rows) / sum(rows) for rows in sides]) if rule.flushes else 1.0
        nbytes = int(share * plan.cut_nbytes[cut])
        ahead_links.append(_transfer(table, here, there, nbytes))
        back_links.append(_transfer(table, there, here, nbytes))
        for n, device in ((cut, here), (cut + 1, there)):
            copying = _copying(table, device, table.link(here, there))
            forward_s[n] += copying * _alone_s(ahead_links[cut])
            backward_s[n] += copying * _alone_s(back_links[cut])
    tied = _tied_transfers(plan, table)
    for (source, target), transfer in tied.items():
        for n in (source, target):
            link = table.link(devices[source], devices[target])
            update_s[n] += _copying(table, devices[n], link) * _alone_s(transfer)
    streams = [table.devices[device].execution == "async" for device in devices]
    times = StageTimes(
        tuple(forward_s),
        tuple(backward_s),
        tuple(update_s),
        tuple(ahead_links),
        tuple(back_links),
        tied,
        table.step_overhead_s,
        chunks=tuple([math.inf if stream else 1.0 for stream in streams]),
        all_reduce_s=tuple([stage.all_reduce_s for stage in plan.stages]),
        gradient_links=tuple(gradient_links),
        loss_s=loss_s(plan, table),
    )
    return share_media(times, plan, table, cluster)


def loss_s(plan: Plan, table: CostTable) -> float:
    """Return the seconds in which the last stage waits for the loss of the whole mini-batch; 0
    without such a loss. The outputs of replicas reach the controller one after another."""
    last = plan.stages[-1].devices
    return max([table.whole_loss[id].total_s for id in last]) if table.whole_loss else 0.0


def _tied_transfers(plan: Plan, table: CostTable) -> dict[tuple[int, int], Transfer]:
    """Return the transfers between stages that share trained parameters, in both directions."""
    if not table.tied or not table.trains:
        return {}
    nbytes: dict[tuple[int, int], int] = {}
    for shared in table.tied:
        owner, *others = sorted({bisect_right(plan.cuts, layer) for layer in shared.layers})
        for edge in [(owner, other) for other in others]:
            nbytes[edge] = nbytes.get(edge, 0) + shared.nbytes
    both = {**nbytes, **{(target, source): n for (source, target), n in nbytes.items()}}
    return {
        (source, target): _transfer(table, plan.devices[source], plan.devices[target], n)
        for (source, target), n in both.items()
    }


def _copying(table: CostTable, device: str, link: LinkCost) -> float:
    """Return the share of a message's time in which the device's computing cores copy it."""
    in_host = is_host_memory(table.devices[device].memory_domain)
    return copying_share(link) if in_host else 0.0


def _gradient_link(table: CostTable, stage: StagePlan) -> Transfer:
    """Return the transfer of a stage's gradients to another replica, on the slowest link."""
    if len(stage.devices) == 1:
        return FREE
    nbytes = sum(layer.params_nbytes for layer in table.layers[stage.lo : stage.hi])
    ways = permutations(stage.devices, 2)
    return max((_transfer(table, *way, nbytes) for way in ways), key=_alone_s)


def _copying_s(table: CostTable, stage: StagePlan, link: Transfer) -> float:
    """Return the seconds in which computing cores copy gradients for one update of `asp`.

    In a round of R updates, for R replicas, each replica sends its gradients to R-1 replicas, and
    receives the gradients of R-1 replicas.
    """
    count = len(stage.devices)
    ways = permutations(stage.devices, 2)
    shares = [_copying(table, here, table.link(here, there)) for here, there in ways]
    return 2 * max(shares, default=0.0) * _alone_s(link) * (count - 1) / count


def _transfer(table: CostTable, source: str, target: str, nbytes: int) -> Transfer:
    link = table.link(source, target)
    return Transfer(link.latency_s, nbytes / link.bandwidth_Bps)


def _alone_s(transfer: Transfer) -> float:
    """Return the seconds from a message's post to its arrival on a free link."""
    return transfer.latency_s + transfer.occupancy_s


def label_of(table: CostTable, devices: Sequence[str]) -> str:
    """Return the least certain label of the costs: modelled, emulated or measured."""
    labels = {table.devices[device].label for device in devices}
    labels |= {link.label for link in table.chain(tuple(devices))}
    return next((label for label in ("modelled", "emulated") if label in labels), "measured")
