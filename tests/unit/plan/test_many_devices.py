"""Plans for hundreds of devices: equal devices are counted, not looked at pair by pair."""

from itertools import product

import pytest

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import ClusterLinks
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Server, Topology
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.errors import CostError
from hetpipe.plan.dapple import candidates
from hetpipe.plan.described import table_from_json, table_to_json
from hetpipe.plan.plan_file import read_plan, write_plan
from hetpipe.plan.planners.choice import plan
from hetpipe.plan.pricing import stage_times
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.plan.server_groups import Machines, Wire, fewest_stages
from hetpipe.plan.sharing import crossing
from hetpipe.plan.simulation import simulate
from hetpipe.study.subject import of_chain

LAYERS, SERVERS, EACH = 24, 64, 8
CHAIN = ChainCosts(
    tuple(map(str, range(LAYERS))),
    tuple(1e-3 * (1 + n % 3) for n in range(LAYERS)),
    tuple(2e-3 * (1 + n % 3) for n in range(LAYERS)),
    *((size,) * LAYERS for size in (10**6, 4 * 10**7, 10**5)),
)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Return a cluster of 64 servers with 8 boards each."""
    members = tuple(
        Member(f"{n}", "", board="v100-sxm-16", server=f"{n // EACH}")
        for n in range(SERVERS * EACH)
    )
    servers = tuple(Server(f"{n}", Topology(5e-6, 25e9, "switch")) for n in range(SERVERS))
    return Cluster(members, servers=servers, network=Topology(2e-5, 3e9, "switch"))


@pytest.mark.parametrize("planner", ["exact", "dapple", "pipedream", "bapipe"])
def test_planners_look_at_few_links(cluster, planner):
    """Plan for 512 devices, and price shared links, with a few links per device; there are 511."""
    subject = of_chain("chain", CHAIN, 64, 32768)
    tables = subject.costs(cluster, [512])
    links = next(iter(tables.values())).links
    assert isinstance(links, ClusterLinks)
    options = PlannerOptions(32768, microbatches=(64,))
    made = plan(tables, cluster, options, planner)
    assert made.lower_bound_s is not None
    assert made.lower_bound_s <= made.step_s
    stage_times(made, tables[512], True, cluster)
    assert len(links._known) < 8 * len(cluster.ids)


def test_files_contain_each_kind_of_device_once(cluster, tmp_path):
    """Write a plan for 512 devices in less than 240 bytes per device; there are 261,632 links."""
    subject = of_chain("chain", CHAIN, 64, 32768)
    tables = subject.costs(cluster, [512])
    made = plan(tables, cluster, PlannerOptions(32768, microbatches=(64,)), "dapple")
    path = tmp_path / "plan.json"
    write_plan(path, made, tables[512])
    assert path.stat().st_size < 240 * len(cluster.ids)
    again, table = read_plan(path)
    assert again == made
    assert table is not None
    assert table.devices == tables[512].devices
    assert all(table.links[pair] == tables[512].links[pair] for pair in (("0", "1"), ("9", "500")))
    for shared in (None, cluster):
        expected = simulate(made, tables[512], shared)
        assert simulate(again, table, shared).timeline == expected.timeline
    lines = str(made).splitlines()
    assert max(map(len, lines[: 1 + len(made.stages)])) < 160


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"like": "b"}, r"cluster.devices.1 is like 'b'; the table has a"),
        ({"id": "a"}, r"cluster.devices.1 is a second device 'a'"),
        ({"server": "t"}, r"cluster is impossible: b: no server 't'; known: s"),
    ],
)
def test_wrong_descriptions_are_refused(change, message):
    members = tuple(Member(id, "", board="t4", server="s") for id in "ab")
    pair = Cluster(members, servers=(Server("s", Topology(5e-6, 25e9)),))
    table = of_chain("chain", CHAIN, 64, 64).costs(pair, [64])[64]
    data = table_to_json(table)
    assert table_from_json(data) == table
    data["cluster"]["devices"][1] |= change
    with pytest.raises(CostError, match=message):
        table_from_json(data)


def test_the_search_of_dapple_counts_few_states(monkeypatch):
    """Ask for a number of transfers that grows with devices, not with their pairs."""
    asked = 0
    lines = Machines.next_lines

    def counted(self, *numbers):
        nonlocal asked
        asked += 1
        return lines(self, *numbers)

    monkeypatch.setattr(Machines, "next_lines", counted)
    machines = Machines((EACH,) * SERVERS, Wire(25e9, 25e9), Wire(3e9, 3e9), samples=64)
    best, *_ = candidates(CHAIN, machines, samples=64, global_batch=4096)
    devices = [number for stage in best.stages for number in stage.devices]
    assert devices == list(range(SERVERS * EACH))
    assert 0 < asked < 64 * len(devices)


@pytest.mark.parametrize("samples", [None, 6])
@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (3, 1, 2, 2)])
def test_consecutive_devices(counts, samples):
    """Price consecutive devices as the counts of their servers."""
    machines = Machines(counts, Wire(8.0, 4.0, 0.1), Wire(2.0, 1.0, 0.5), samples)
    servers = [server for server, count in enumerate(counts) for _ in range(count)]

    def group(first, size):
        own = servers[first : first + size]
        return tuple(own.count(server) for server in range(len(counts)))

    for first, source, target in product(range(6), range(1, 4), range(1, 4)):
        if first + source + target > len(servers):
            continue
        groups = group(first, source), group(first + source, target)
        assert machines.next_lines(first, source, target) == machines.transfer_lines(*groups)
        expected_s = machines.all_reduce_s(7.0, groups[0])
        assert machines.next_all_reduce_s(7.0, first, source) == expected_s


def test_fewest_stages():
    assert fewest_stages(7, (2, 3)) == [0, float("inf"), 1, 1, 2, 2, 2, 3]


def test_crossing_of_unlike_shares():
    """Divide the rows of 3 replicas among 2, in order."""

    class Stage:
        def __init__(self, devices, shares):
            self.devices, self.shares = devices, shares

    class Shape:
        stages = Stage("abc", (1.0, 2.0, 1.0)), Stage("de", (1.0, 3.0))

    expected = {("a", "d"): 0.25, ("b", "e"): 0.5, ("c", "e"): 0.25}
    assert crossing(Shape(), 0) == expected
