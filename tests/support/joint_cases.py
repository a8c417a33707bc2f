"""Random small planning problems, and all possible plans for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.errors import HetpipeError
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, deep_in_flight, in_flight

MIB = 1 << 20
MINI_BATCH = 8
SIZES = (1, 2, 4, 8)


def joint_case(seed: int) -> tuple[dict[int, CostTable], Cluster]:
    """Return costs of two or three unlike devices and three to six layers, and a cluster."""
    draw = random.Random(seed)
    devices = [f"d{n}" for n in range(draw.choice([2, 3, 3]))]
    layers = draw.randint(3, 6)
    speeds = {device: 2 ** draw.uniform(-2, 2) for device in devices}
    times_s = {
        device: [
            draw.uniform(0.2, 2.0) * draw.uniform(0.7, 1.3) / speeds[device] for _ in range(layers)
        ]
        for device in devices
    }
    fixed_s = {device: draw.choice([0.0, 0.05, 0.5]) / speeds[device] for device in devices}
    params = [draw.randint(1, 40) * MIB for _ in range(layers)]
    saved = [draw.randint(1, 8) * MIB for _ in range(layers)]
    cut = [draw.randint(1, 8) * MIB for _ in range(layers)]
    links = {
        pair: LinkCost(draw.choice([0.0, 0.01]), MIB * 2 ** draw.uniform(3, 9))
        for pair in permutations(devices, 2)
    }
    need = sum(4 * nbytes for nbytes in params)
    memory = {
        device: draw.choice([1 << 40, 1 << 40, int(need * draw.uniform(0.5, 1.5))])
        for device in devices
    }

    def table(samples: int) -> CostTable:
        share = samples / 4
        return CostTable(
            "case",
            samples,
            tuple(
                LayerBytes(
                    f"l{n}", params[n], 2 * params[n], int(saved[n] * share), int(cut[n] * share)
                )
                for n in range(layers)
            ),
            {
                device: DeviceCost(
                    tuple(
                        LayerCost(fixed_s[device] + time_s, fixed_s[device] + 2 * time_s, 0.01)
                        for time_s in (share * each_s for each_s in times_s[device])
                    ),
                    fixed_s[device], memory[device], device,
                )
                for device in devices
            },
            links,
        )  # fmt: skip

    cluster = Cluster(tuple(Member(device, "made:up:0") for device in devices))
    return {size: table(size) for size in SIZES}, cluster


def all_proposals(
    tables: dict[int, CostTable], cluster: Cluster, options: PlannerOptions
) -> Iterator[Proposal]:
    """Yield all orders and groups of all subsets, with all cuts, sizes, schedules, two depths."""
    layers = len(tables[1].layers)
    for groups in _groups(cluster.ids):
        stages = len(groups)
        for count in options.counts(tables):
            for cuts in combinations(range(1, layers), stages - 1):
                for schedule in ("1f1b", "gpipe"):
                    yield Proposal(
                        cuts, groups, schedule, count, in_flight(schedule, stages, count)
                    )
                yield Proposal(cuts, groups, "1f1b", count, deep_in_flight(stages, count))


def tight_case(seed: int) -> tuple[dict[int, CostTable], Cluster]:
    """Return a case of two devices and few layers with too little memory for its quick plans."""
    draw = random.Random(f"tight {seed}")
    tables, cluster = joint_case(seed)
    cluster = Cluster(cluster.members[:2])
    whole = tables[MINI_BATCH]
    weights = sum(2 * layer.params_nbytes + layer.state_nbytes for layer in whole.layers)
    saved = sum(layer.saved_nbytes for layer in whole.layers)
    rooms = {id: int(draw.uniform(0.3, 0.8) * (weights + 2 * saved)) for id in cluster.ids}
    shrunk = {}
    for size, table in tables.items():
        layers = tuple(
            replace(layer, saved_nbytes=8 * layer.saved_nbytes) for layer in table.layers[:4]
        )
        devices = {
            id: replace(table.devices[id], layers=table.devices[id].layers[:4], memory_nbytes=room)
            for id, room in rooms.items()
        }
        shrunk[size] = replace(table, layers=layers, devices=devices)
    return shrunk, cluster


def all_depths(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    """Yield the proposals with every lower bound on micro-batches in flight, and with recompute."""
    for proposal in proposals:
        depths = proposal.in_flight
        lower = max(depths) if proposal.schedule == "1f1b" else 1
        for fewer in range(lower):
            bounded = tuple(min(depth, max(depths) - fewer) for depth in depths)
            for recompute in (False, True):
                yield replace(proposal, in_flight=bounded, recompute=recompute)


def best_step_s(tables: dict[int, CostTable], cluster: Cluster, options: PlannerOptions) -> float:
    """Return the shortest simulated step of all plans; infinite if none fits."""
    priced, best_s = Priced(tables, options), float("inf")
    proposals = all_proposals(tables, cluster, options)
    for proposal in dict.fromkeys(all_depths(proposals) if options.recompute else proposals):
        try:
            best_s = min(best_s, priced.plan(proposal, "brute force").step_s)
        except HetpipeError:
            continue
    return best_s


def _groups(members: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    for size in range(1, len(members) + 1):
        for order in permutations(members, size):
            for count in range(size):
                for ends in combinations(range(1, size), count):
                    groups = tuple(
                        order[a:b] for a, b in zip((0, *ends), (*ends, size), strict=True)
                    )
                    if all(tuple(sorted(group)) == group for group in groups):
                        yield groups
