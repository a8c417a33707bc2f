"""Topologies: the links that messages see, the media that they share, and the papers' clusters."""

from __future__ import annotations

import math
import random
import re
import warnings
from itertools import pairwise, permutations, product
from pathlib import Path

import networkx
import pytest

from hetpipe.cli.options import make_cluster
from hetpipe.cluster import Cluster, Link, Member, Server, Topology
from hetpipe.cluster.cluster import load_or_published
from hetpipe.cluster.links import link_costs
from hetpipe.cluster.published import published_names
from hetpipe.cluster.topology import DUPLEXES, SHAPES
from hetpipe.errors import ClusterError

ROOT = Path(__file__).parents[3]
PAPERS = ROOT / "hetpipe" / "cluster" / "papers"


def of_boards(
    sizes: list[int],
    inside: Topology | None = None,
    network: Topology | None = None,
    links: dict[frozenset[str], Link] | None = None,
) -> Cluster:
    """Return a cluster with `sizes[n]` boards in server n: servers s0, s1, ...; boards s0.0,
    s0.1, ..."""
    members = [
        Member(f"s{server}.{n}", "", board="t4", server=f"s{server}")
        for server, size in enumerate(sizes)
        for n in range(size)
    ]
    servers = tuple(Server(f"s{server}", inside) for server in range(len(sizes)))
    return Cluster(tuple(members), links or {}, servers=servers, network=network)


def wires(topology: Topology, ends: list[str]) -> networkx.Graph[str]:
    """Return the topology as a graph whose edges are the wires."""
    graph: networkx.Graph[str] = networkx.Graph()
    if topology.shape == "switch":
        graph.add_edges_from((end, "the switch") for end in ends)
    elif topology.shape == "chain":
        networkx.add_path(graph, ends)
    else:
        graph.add_edges_from(permutations(ends, 2))
    return graph


def wires_of(cluster: Cluster, topology: Topology, one: str, other: str) -> tuple[set[object], int]:
    """Return the wires that a message occupies on its shortest way, by brute force, and its
    hops."""
    (a, b) = (cluster.member(id).server for id in (one, other))
    if a == b:
        where, ends = a, [member.id for member in cluster.members if member.server == a]
    else:
        where, ends, one, other = "network", [server.name for server in cluster.servers], a, b
    stops = networkx.shortest_path(wires(topology, ends), one, other)
    hops = list(pairwise(stops))
    if topology.shape == "bus":
        return {where}, 1
    if topology.duplex == "half":
        return {(where, frozenset(hop)) for hop in hops}, len(hops)
    return {(where, hop) for hop in hops}, len(hops)


@pytest.mark.parametrize(("shape", "duplex"), product(SHAPES, DUPLEXES))
def test_messages_share_media_if_their_ways_share_wires(shape: str, duplex: str) -> None:
    rng = random.Random(f"{shape} {duplex}")
    topology = Topology(1e-6, 1e9, shape, duplex)
    sharing = 0
    for _ in range(10):
        cluster = of_boards(
            [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], topology, topology
        )
        pairs = list(permutations(cluster.ids, 2))
        real = {pair: wires_of(cluster, topology, *pair) for pair in pairs}
        for pair in pairs:
            hops = real[pair][1] if shape == "chain" else 1
            link = cluster.link(*pair)
            assert link.latency_s == pytest.approx(hops * 1e-6)
            assert link.bandwidth_Bps == 1e9
        for one, other in permutations(pairs, 2):
            share = bool(real[one][0] & real[other][0])
            sharing += share
            media, other_media = (set(cluster.way(*pair)) for pair in (one, other))
            assert bool(media & other_media) == share, (one, other)
    assert sharing


def test_a_way_without_shared_media_is_empty() -> None:
    wire = Topology(0.0, 1e9)
    cluster = of_boards([2, 1, 1], wire, wire, {frozenset(("s1.0", "s2.0")): Link(0.0, 5e9)})
    assert cluster.way("s0.0", "s0.1") == ()  # a separate link
    assert cluster.way("s1.0", "s2.0") == ()  # a separate link too
    assert cluster.way("s0.0", "s0.0") == ()
    uplink = cluster.way("s0.0", "s1.0")
    assert uplink == cluster.way("s0.1", "s1.0") != ()  # shared by both devices of s0
    alone = of_boards([1, 1], None, wire)
    assert alone.way("s0.0", "s1.0") == ()
    assert of_boards([2]).way("s0.0", "s0.1") == ()


def test_the_names_of_media_tell_their_place() -> None:
    switch, half = Topology(0.0, 1e9, "switch"), Topology(0.0, 1e9, "chain", "half")
    cluster = of_boards([3, 3], half, switch)
    media = ("network: server s0 up", "network: server s1 down")
    assert cluster.way("s0.0", "s1.2") == media
    there = ("server s1: s1.0 - s1.1", "server s1: s1.1 - s1.2")
    assert cluster.way("s1.0", "s1.2") == there
    assert cluster.way("s1.2", "s1.0") == there[::-1]
    assert of_boards([2], Topology(0.0, 1e9, "bus")).way("s0.1", "s0.0") == ("server s0",)


def test_a_link_takes_precedence_over_server_and_network() -> None:
    inside, network = Topology(1e-6, 1e10), Topology(1e-5, 1e9)
    pairs = {
        frozenset(("s0.0", "s0.1")): Link(2e-6, None),
        frozenset(("s0.0", "s1.0")): Link(0.0, 3e9),
    }
    cluster = of_boards([2, 2], inside, network, pairs)
    assert cluster.link("s0.1", "s0.0") == Link(2e-6, 1e10)  # the server's bandwidth
    assert cluster.link("s1.0", "s0.0") == Link(0.0, 3e9)
    assert cluster.link("s1.0", "s1.1") == Link(1e-6, 1e10)
    assert cluster.link("s1.0", "s0.1") == Link(1e-5, 1e9)
    assert cluster.way("s0.0", "s1.0") == ()
    assert cluster.way("s0.1", "s1.0") == ("network: server s0 > server s1",)


def test_a_link_without_a_bandwidth_uses_the_servers_media() -> None:
    bus = Topology(0.0, 1e9, "bus")
    cluster = of_boards([2], bus, None, {frozenset(("s0.0", "s0.1")): Link(1e-3, None)})
    assert cluster.link("s0.0", "s0.1") == Link(1e-3, 1e9)
    assert cluster.way("s0.0", "s0.1") == ("server s0",)


def test_a_board_without_a_way_to_another_device_is_named_with_the_cure() -> None:
    cluster = of_boards([2, 1])
    with pytest.raises(
        ClusterError, match=r"between s0\.1 and s1\.0: add a \[\[link\]\] .* or a \[n"
    ):
        cluster.link("s0.1", "s1.0")
    with pytest.raises(ClusterError, match=r"s0\.0 and s0\.1: add .* or `inside` to server s0"):
        cluster.link("s0.0", "s0.1")
    attached = Cluster((Member("a", "x"), Member("b", "y"), Member("c", "", board="t4")))
    assert attached.link("a", "b") == Link()  # the transport's link
    with pytest.raises(ClusterError, match="between c and a"):  # the transport knows no board
        attached.link("c", "a")


def test_groups_are_servers_or_single_devices_in_order() -> None:
    inside = Member("a", "x", server="s"), Member("c", "x", server="s")
    members = (inside[0], Member("s", "x"), Member("b", "x"), inside[1])
    cluster = Cluster(members, servers=(Server("s"), Server("empty")))
    assert cluster.groups() == (("a", "c"), ("s",), ("b",))


def test_levels_are_devices_of_a_server_then_servers() -> None:
    inside, network = Topology(0.0, 5e9, "switch"), Topology(0.0, 1e9, "bus", all_reduce_Bps=2e9)
    assert of_boards([4, 4, 4], inside, network).levels() == ((4, 5e9), (3, 1e9))
    assert of_boards([4], inside, network).levels() == ((4, 5e9),)
    assert of_boards([1, 1], inside, network).levels() == ((2, 1e9),)
    assert of_boards([1]).levels() == ((1, math.inf),)
    pairs = [frozenset(pair) for pair in (("a", "b"), ("b", "c"), ("a", "c"))]
    members = tuple(Member(id, "x") for id in "abc")
    assert Cluster(members, dict.fromkeys(pairs, Link(0.0, 7.0))).levels() == ((3, 7.0),)


WIRE = Topology(0.0, 1e9)
AB = frozenset(("s0.0", "s0.1"))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (of_boards([2, 3], WIRE, WIRE), "server s0 has 2 devices and server s1 3"),
        (of_boards([2, 2], None, WIRE), "bandwidth inside server s0; add `inside` to it"),
        (of_boards([2, 2], WIRE), r"bandwidth between servers; add a \[network\]"),
        (of_boards([2, 2], WIRE, Topology(1e-6)), r"bandwidth between servers; add a \[network\]"),
        (of_boards([3], WIRE, None, {AB: Link(0.0, 1e9)}), "1 of 3 pairs have a separate link"),
        (
            of_boards([3], WIRE, None, {AB: Link(0.0, 1.0), frozenset(("s0.0", "s0.2")): Link()}),
            "its links have several bandwidths",
        ),
    ],
)
def test_an_irregular_cluster_has_no_levels(cluster: Cluster, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.levels()


def test_servers_of_unequal_bandwidth_have_no_levels() -> None:
    members = of_boards([2, 2]).members
    servers = Server("s0", Topology(0.0, 2e9)), Server("s1", Topology(0.0, 1e9))
    with pytest.raises(ClusterError, match=r"s0 has 2e\+09 B/s inside and server s1 1e\+09"):
        Cluster(members, servers=servers, network=WIRE).levels()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": "ring"}, "no shape 'ring'; known: point-to-point, switch, bus, chain"),
        ({"duplex": "simplex"}, "no duplex 'simplex'; known: full, half"),
        ({"latency_s": -1.0}, "latency is -1.0 s, must be 0 or more"),
        ({"bandwidth_Bps": 0.0}, "bandwidth is 0.0 B/s, must be above 0"),
        ({"all_reduce_Bps": math.inf}, "bandwidth is inf B/s, must be above 0 and finite"),
    ],
)
def test_invalid_topologies_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Topology(**wrong)  # type: ignore[arg-type]


def test_sums_use_the_bandwidth_unless_all_reduce_is_given() -> None:
    assert Topology(0.0, 1e9).sum_speed == 1
    assert Topology(0.0, 1e9, all_reduce_Bps=3e9).sum_speed == 3
    inside, network = Topology(0.0, 5e9, "switch"), Topology(0.0, 1e9, all_reduce_Bps=2e9)
    costs = link_costs(of_boards([2, 1], inside, network))
    assert {pair: (link.bandwidth_Bps, link.sum_Bps) for pair, link in costs.items()} == {
        **dict.fromkeys(permutations(("s0.0", "s0.1")), (5e9, 5e9)),
        **dict.fromkeys(product(("s0.0", "s0.1"), ("s1.0",)), (1e9, 2e9)),
        **dict.fromkeys(product(("s1.0",), ("s0.0", "s0.1")), (1e9, 2e9)),
    }


def test_ten_thousand_devices() -> None:
    cluster = of_boards([8] * 1250, WIRE, Topology(1e-6, 1e9, "chain"))
    assert cluster.levels() == ((8, 1e9), (1250, 1e9))
    assert cluster.link("s0.0", "s1249.7").latency_s == pytest.approx(1249e-6)
    assert len(cluster.way("s1249.7", "s0.0")) == 1249
    assert cluster.groups()[1249][7] == "s1249.7"
    with pytest.raises(ClusterError, match=r"no device 's1249\.8'; did you mean s1249\.\d"):
        cluster.member("s1249.8")
    costs = link_costs(cluster)
    assert len(costs) == 10_000 * 9_999
    assert costs["s0.0", "s1249.7"].latency_s == pytest.approx(1249e-6)
    assert ("s0.0", "s0.0") not in costs
    assert ("s0.0", "s1249.8") not in costs


PUBLISHED = {  # boards in order, devices of each server, levels as (count, B/s)
    "pipedream-a": (["v100-pcie-16"] * 16, [4] * 4, ((4, 15.75e9), (4, 10e9 / 8))),
    "pipedream-b": (["v100-sxm-16"] * 16, [8] * 2, ((8, 25e9), (2, 25e9 / 8))),
    "pipedream-c": (["titan-x"] * 4, [1] * 4, ((4, 40e9 / 8),)),
    "dapple-a": (["v100-sxm-16"] * 16, [8] * 2, ((8, 25e9), (2, 25e9 / 8))),
    "dapple-b": (["v100-sxm-16"] * 16, [1] * 16, ((16, 25e9 / 8),)),
    "dapple-c": (["v100-sxm-16"] * 16, [1] * 16, ((16, 10e9 / 8),)),
    "bapipe-4-v100": (["v100-pcie-16"] * 4, [4], ((4, 15.75e9),)),
    "bapipe-8-v100": (["v100-pcie-16"] * 8, [8], ((8, 15.75e9),)),
    "bapipe-4-vcu118": (["vcu118"] * 4, [1] * 4, ((4, 12.5e9),)),
    "bapipe-2-vcu129-2-vcu118": (["vcu129"] * 2 + ["vcu118"] * 2, [1] * 4, ((4, 12.5e9),)),
    "bapipe-4-vcu129": (["vcu129"] * 4, [1] * 4, ((4, 12.5e9),)),
    "pipeoptim-a": (["rtx-2080-ti"] * 4, [4], ((4, 15.75e9),)),
    "pipeoptim-b": (["p100"] * 4, [4], ((4, 15.75e9),)),
}
"""The figures come from the papers' tables 2 and 5 and their experiment sections."""


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *published_names()}))
def test_published_clusters_match_the_papers(name: str) -> None:
    boards, sizes, levels = PUBLISHED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = Cluster.published(name)
    assert [member.board for member in cluster.described] == boards
    assert list(map(len, cluster.groups())) == sizes
    assert cluster.levels() == levels
    paper = name.partition("-")[0]
    first, *_ = (PAPERS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    assert first.startswith("#")
    assert paper in first.lower()


def test_messages_pass_through_the_boards_of_a_daisy_chain() -> None:
    chain = Cluster.published("bapipe-2-vcu129-2-vcu118")
    assert [len(chain.way("vcu129.0", id)) for id in chain.ids[1:]] == [1, 2, 3]


def test_a_wheel_contains_the_published_clusters() -> None:
    """A file that matches no listed pattern would be missing."""
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["hetpipe.cluster"]
    shipped = {path for pattern in patterns for path in PAPERS.parent.glob(pattern)}
    assert shipped == set(PAPERS.iterdir())


def test_commands_take_a_published_name_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_cluster(Path("dapple-b"), None, None, None) == Cluster.published("dapple-b")
    with pytest.raises(ClusterError, match=r"no published cluster 'dapple', .* mean dapple-a, da"):
        make_cluster(Path("dapple"), None, None, None)
    with pytest.raises(ClusterError, match=r"absent\.toml: cannot be read"):
        make_cluster(Path("absent.toml"), None, None, None)
    monkeypatch.chdir(tmp_path)
    Path("dapple-b").write_text('[[device]]\nboard = "t4"\n', encoding="utf-8")
    assert load_or_published("dapple-b").ids == ("t4.0",)  # a file takes precedence


def test_a_speed_of_a_board_is_refused() -> None:
    with pytest.raises(
        ClusterError, match=re.escape("titan-x.1 is a board, titan-x, with modelled times")
    ):
        make_cluster(Path("pipedream-c"), None, None, ["titan-x.1=0.5"])
