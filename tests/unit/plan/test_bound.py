"""The lower bound of a step, compared with the linear programme that it bounds from below."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from tables import make_table

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Server, Topology
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.errors import PlanError
from hetpipe.plan.bound import lower_bound_s, shared_s, slowest_layer_s
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.study.subject import of_chain, sizes_of


def optimum_s(times_s):
    """Return the linear programme's optimum by HiGHS, which divides layers freely among devices."""
    optimize = pytest.importorskip("scipy.optimize")
    devices, layers = times_s.shape
    count = devices * layers
    objective = np.zeros(count + 1)
    objective[-1] = 1.0
    loads = np.zeros((devices, count + 1))
    whole = np.zeros((layers, count + 1))
    for device in range(devices):
        for layer in range(layers):
            loads[device, device * layers + layer] = times_s[device, layer]
            whole[layer, device * layers + layer] = 1.0
        loads[device, -1] = -1.0
    solved = optimize.linprog(
        objective, A_ub=loads, b_ub=np.zeros(devices), A_eq=whole, b_eq=np.ones(layers)
    )
    return solved.fun


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_below_the_optimum_and_near_it(seed):
    draw = np.random.default_rng(seed)
    devices, layers = draw.integers(1, 7), draw.integers(1, 30)
    speeds = 2 ** draw.uniform(-2, 2, (devices, 1))
    times_s = draw.uniform(0.5, 2, (1, layers)) * draw.uniform(0.5, 1.5, (devices, layers)) / speeds
    bound_s, best_s = shared_s(times_s), optimum_s(times_s)
    assert bound_s <= best_s * (1 + 1e-9)
    assert bound_s >= 0.97 * best_s


def test_devices_with_proportional_times():
    times_s = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert shared_s(times_s) == pytest.approx(4.0)  # 6 s on one, 12 s on the other


def test_a_device_that_takes_no_time():
    assert shared_s(np.array([[1.0, 2.0], [0.0, 0.0]])) == 0.0
    assert shared_s(np.array([[1.0, 2.0], [0.0, 3.0]])) == pytest.approx(1.2)  # 3/5 of layer 1


def test_many_equal_devices():
    assert shared_s(np.ones((512, 100))) == pytest.approx(100 / 512)


def cluster_of(servers, each, inside, network):
    members = tuple(
        Member(f"{n}", "", board="v100-sxm-16", server=f"{n // each}")
        for n in range(servers * each)
    )
    own = tuple(Server(f"{n}", inside) for n in range(servers))
    return Cluster(members, servers=own, network=network)


def random_problem(draw, layers, mini_batch):
    """Return a chain's subject, and 2 servers of 2 boards with slow or fast links."""
    chain = ChainCosts(
        tuple(map(str, range(layers))),
        *(tuple(10 ** draw.uniform(-5, -2) for _ in range(layers)) for _ in range(2)),
        *(tuple(draw.randint(10**3, 10**7) for _ in range(layers)) for _ in range(3)),
    )
    inside, network = (
        Topology(10 ** draw.uniform(-6, -3), 10 ** draw.uniform(9, 11), shape)
        for shape in ("switch", draw.choice(["switch", "chain", "bus"]))
    )
    return of_chain("chain", chain, 8, mini_batch), cluster_of(2, 2, inside, network)


def all_proposals(ids, layers, mini_batch):
    """Yield proposals with all cuts, and with all ordered groups of devices."""
    counts = [2**k for k in range(mini_batch.bit_length())]
    for used in range(1, len(ids) + 1):
        for order in permutations(ids, used):
            for stages in range(1, min(used, layers) + 1):
                for ends in combinations(range(1, used), stages - 1):
                    groups = tuple(
                        order[lo:hi] for lo, hi in zip((0, *ends), (*ends, used), strict=True)
                    )
                    if any(group != tuple(sorted(group)) for group in groups):
                        continue
                    for cuts in combinations(range(1, layers), stages - 1):
                        for count in counts:
                            depths = tuple(min(count, stages - n) for n in range(stages))
                            yield Proposal(cuts, groups, "1f1b", count, depths)
    for used, count in product(range(2, len(ids) + 1), counts):
        yield Proposal((), (ids[:used],), "data-parallel", count)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_below_the_bound(seed):
    """Compare the bound with every plan of 3 layers on 2 servers of 2 boards."""
    draw = random.Random(seed)
    subject, cluster = random_problem(draw, layers=3, mini_batch=8)
    tables, options = subject.costs(cluster, sizes_of(8)), subject.options()
    bound_s, steps_s = lower_bound_s(tables, cluster.ids, options), []
    priced = Priced(tables, options)
    for proposal in all_proposals(cluster.ids, 3, 8):
        try:
            steps_s.append(priced.plan(proposal, "user").step_s)
        except PlanError:
            continue
    assert len(steps_s) > 500
    assert bound_s <= min(steps_s) * (1 + 1e-9)


@pytest.mark.parametrize("count", [2, 5])
def test_devices_that_slow_each_other_down_are_faster_alone(count):
    """Each of two devices is twice as fast alone, so one is as fast as both."""
    names = "abcde"[:count]
    table = make_table(dict.fromkeys(names, 1.0), samples=8)
    slowed = {id: replace(cost, alone=0.5) for id, cost in table.devices.items()}
    tables, options = {8: replace(table, devices=slowed)}, PlannerOptions(8, (1,))
    alone = Priced(tables, options).plan(Proposal((), (("a",),), "1f1b", 1), "user")
    bound_s = lower_bound_s(tables, names, options)
    assert bound_s <= alone.step_s
    assert bound_s == pytest.approx(
        0.5 * lower_bound_s({8: table}, "a" if count == 2 else names, options), rel=1e-3
    )


def test_layers_larger_than_a_server_are_summed_over_the_network():
    """Divide 8 s of passes among r devices: 2 of a server, or more with sums over the network."""
    chain = ChainCosts(("0", "1"), (1.0, 0.0), (1.0, 0.0), (0, 0), (10**6, 0), (0, 0))
    subject = of_chain("chain", chain, 1, 4)
    for network_Bps, expected_s in ((1e6, 2.0 + 1.5), (1e5, 4.0 + 1e-3)):
        cluster = cluster_of(2, 2, Topology(0.0, 1e9), Topology(0.0, network_Bps))
        table = subject.costs(cluster, [1])[1]
        times_s = np.array([[8.0, 0.0]] * 4)
        assert slowest_layer_s(table, times_s) == pytest.approx(expected_s)
