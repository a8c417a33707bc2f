"""The step of an asynchronous plan is the period of a long stream, computed by recursion."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from tables import MIB, make_table, plan_by

from hetpipe.cost.table import DeviceCost, LayerCost, LinkCost
from hetpipe.plan.bound import lower_bound_s
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import stage_times
from hetpipe.plan.proposal import PlannerOptions, Proposal, single_device_groups
from hetpipe.plan.simulation import simulate


def stream_period_s(plan, times, mini_batches):
    """Return the seconds between two mini-batches of a long stream, without a schedule or a
    clock.

    Replicas take mini-batches in turn and begin with their depth of forwards. After a round they
    sum and update.
    """
    parts, stages = plan.microbatches, range(len(plan.stages))
    rows = {}
    for stage in stages:
        for replica in range(plan.replicas[stage]):
            own = range(replica, mini_batches, plan.replicas[stage])
            numbers = [b * parts + part for b in own for part in range(parts)]
            deep = plan.in_flight[stage]
            row = [("F", n) for n in numbers[:deep]]
            for place, number in enumerate(numbers):
                row.append(("B", number))
                if number % parts == parts - 1:
                    row.append(("U", number // parts // plan.replicas[stage]))
                row += [("F", n) for n in numbers[place + deep : place + deep + 1]]
            rows[stage, replica] = row
    arrived, free_s, summing = {}, {}, {}
    summed_s = {}
    clock_s, places = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0)
    ends_s = {}

    def send(kind, stage, replica, number, now_s):
        target = stage + (1 if kind == "F" else -1)
        if target not in stages:
            return
        there = target, number // parts % plan.replicas[target]
        links = times.forward_links if kind == "F" else times.backward_links
        link = links[min(stage, target)]
        edge = stage, replica, *there
        left_s = max(now_s, free_s.get(edge, 0.0)) + link.occupancy_s
        free_s[edge] = left_s
        arrived[kind, target, number] = left_s + link.latency_s

    moved = True
    while moved:
        moved = False
        for (stage, replica), row in rows.items():
            while places[stage, replica] < len(row):
                op, number = row[places[stage, replica]]
                now_s = clock_s[stage, replica]
                if op == "U":
                    count = plan.replicas[stage]
                    gathered = summing.setdefault((stage, number), {})
                    gathered.setdefault(replica, now_s)
                    if len(gathered) < count:
                        break
                    key = stage, number
                    if count > 1 and key not in summed_s:
                        before_s = summed_s.get((stage, number - 1), 0.0)
                        begin_s = max(before_s, *gathered.values())
                        summed_s[key] = begin_s + times.all_reduce_s[stage]
                    now_s = max(now_s, summed_s.get(key, 0.0)) + times.update_s[stage]
                else:
                    first = stage == (0 if op == "F" else stages[-1])
                    if not first and (op, stage, number) not in arrived:
                        break
                    now_s = max(now_s, 0.0 if first else arrived[op, stage, number])
                    now_s += (times.forward_s if op == "F" else times.backward_s)[stage]
                    ends_s[op, stage, number] = now_s
                    send(op, stage, replica, number, now_s)
                clock_s[stage, replica] = now_s
                places[stage, replica] += 1
                moved = True
    last = parts * (mini_batches - 40) - 1
    half = parts * (mini_batches // 2) - 1
    return (ends_s["B", 0, last] - ends_s["B", 0, half]) / ((last - half) / parts)


def stream_case(seed, replicated):
    """Return a plan on unlike devices, and its table."""
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    replicas = [draw.choice([1, 1, 2, 3]) if replicated else 1 for _ in range(stages)]
    names = [f"d{n}" for n in range(sum(replicas))]
    layers = stages + draw.randint(0, 4)

    def cost():
        return LayerCost(draw.uniform(0.05, 2), draw.uniform(0.05, 2), draw.choice([0, 0.1, 1.0]))

    links = {
        pair: LinkCost(draw.choice([0, 0.5, 3.0]), MIB * draw.choice([0.3, 1, 9, 1e6]))
        for pair in permutations(names, 2)
    }
    table = replace(
        make_table(dict.fromkeys(names, 1.0), layers, overhead_s=0.5),
        devices={
            name: DeviceCost(tuple(cost() for _ in range(layers)), 0.0, 1 << 50, name)
            for name in names
        },
        links=links,
    )
    members = iter(names)
    groups = tuple(tuple(next(members) for _ in range(count)) for count in replicas)
    cuts = tuple(sorted(draw.sample(range(1, layers), stages - 1)))
    parts = 1 if replicated else draw.choice([1, 1, 2, 4])
    depths = [draw.randint(1, 2)]
    while len(depths) < stages:
        depths.append(depths[-1] + draw.randint(0, 2))
    straight = tuple(stages - n for n in range(stages))
    own = () if replicated else draw.choice([tuple(depths[::-1]), straight])
    proposal = Proposal(cuts, groups, "pipedream", parts, own)
    return plan_by({4: table}, proposal, 4 * parts, "stash"), table


def load_s(plan):
    """Return the slowest stage's seconds for a mini-batch, which its replicas take in turn."""
    return max(
        plan.microbatches * (stage.forward_s + stage.backward_s) / len(stage.devices)
        + stage.update_s / len(stage.devices)
        for stage in plan.stages
    )


@pytest.mark.parametrize("replicated", [False, True])
def test_the_step_is_the_period_of_a_long_stream_and_above_every_bound(replicated):
    for seed in range(20):
        plan, table = stream_case(seed, replicated)
        times = stage_times(plan, table, as_planned=True)
        count = 24 * math.lcm(*plan.replicas) + 300
        assert plan.step_s == pytest.approx(stream_period_s(plan, times, count), rel=0.01), seed
        assert plan.step_s >= load_s(plan) * (1 - 1e-12)
        options = PlannerOptions(plan.mini_batch, schedules=("pipedream",))
        assert lower_bound_s({4: table}, table.devices, options) <= plan.step_s * (1 + 1e-9)


def test_the_slowest_of_many_stages_sets_the_pace():
    """The last mini-batches do not count: no forwards run beside them."""
    speeds = {f"d{n}": 1.5 if n == 9 else 3.0 for n in range(16)}
    table = make_table(speeds, 16)
    proposal = Proposal(tuple(range(1, 16)), single_device_groups(list(speeds)), "pipedream", 1)
    plan = plan_by({4: table}, proposal, 4, "stash")
    assert plan.step_s == pytest.approx(2.0 + 0.1 / 1.5)


def test_replicas_apply_every_gradient_under_asp():
    """Under `asp` each of 3 replicas computes 3 s of every 9 s, and does all updates."""
    table = make_table(dict.fromkeys("abc", 1.0), 1)
    options = PlannerOptions(4, (1,), ("asp",))
    plan = Priced({4: table}, options).plan(Proposal((), (tuple("abc"),), "asp", 1), "test")
    assert plan.step_s == pytest.approx((3.0 + 3 * 0.1) / 3, rel=1e-4)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_simulation_has_the_step_of_its_plan(schedule):
    """Check it with the controller's overhead too, and with a stream for each mini-batch."""
    table = make_table({"a": 1.0, "b": 3.0}, overhead_s=2.0, bandwidth=MIB)
    weights = "stash" if schedule == "pipedream" else "flush"
    plan = plan_by({4: table}, Proposal((3,), (("a",), ("b",)), schedule, 1), 4, weights)
    simulation = simulate(plan, table)
    assert simulation.step_s == plan.step_s
    assert simulation.to_json()["step_s"] == plan.step_s
    assert simulation.outcome.link_nbytes == {(0, 1): MIB, (1, 0): MIB}
    busy_s = [sum((stage.forward_s, stage.backward_s, stage.update_s)) for stage in plan.stages]
    if schedule == "pipedream":  # for a step in a full pipeline
        shares = 1 - np.array(busy_s) / plan.step_s
        assert simulation.outcome.bubble == pytest.approx(tuple(shares), abs=1e-6)
