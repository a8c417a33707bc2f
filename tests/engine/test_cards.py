"""Messages of a host share its network card, or have separate ways."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import measured
import pytest
from networks import Shape, network
from tables import MIB, make_table, plan_by

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Server, Topology
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.plan.proposal import Proposal
from hetpipe.plan.sharing import measured_media
from hetpipe.plan.simulation import simulate
from hetpipe.profile import cards

HOSTS = "a", "b", "c"


class Card:
    """A crew whose messages of 1 s take as long as some media allow."""

    def __init__(self, media: dict[str, str]) -> None:
        self.media = media
        members = tuple(Member(f"{host}/d", "d", host=host) for host in HOSTS)
        self.cluster, self.infos = Cluster(members), {member.id: None for member in members}
        self.links = {
            way: LinkCost(1e-3, cards.NBYTES[-1] / 1.0) for way in permutations(self.infos, 2)
        }

    def round_trips(self, crew: Any, ways: Sequence[Any], *_: int) -> list[list[float]]:
        used = [
            self.media.get(part, part)
            for source, target in ways
            for part in (f"{source[0]} up", f"{target[0]} down")
        ]
        return [[1.0 * max(map(used.count, used))] * cards.ROUNDS for _ in ways]


@pytest.mark.parametrize(
    ("media", "found"),
    [
        ({}, {"a up", "a down", "b up", "b down", "c up", "c down"}),
        ({"a up": "a", "a down": "a"}, {"a", "b up", "b down", "c up", "c down"}),
    ],
)
def test_cards_of_one_or_two_directions_are_found(
    monkeypatch: pytest.MonkeyPatch, media: dict[str, str], found: set[str]
) -> None:
    card: Any = Card(media)
    monkeypatch.setattr(cards, "round_trips", card.round_trips)
    monkeypatch.setattr(cards, "networked_hosts", lambda crew: set(HOSTS))
    links = cards.with_cards(card, card.links)
    assert {medium for link in links.values() for medium in link.media} == found
    assert links["b/d", "c/d"].media == ("b up", "c down")
    monkeypatch.setattr(cards, "networked_hosts", lambda crew: set())
    assert cards.with_cards(card, card.links) == card.links


def test_a_plan_by_measured_cards_is_priced_as_one_by_a_described_switch() -> None:
    plain = make_table({"a": 1.0, "b": 1.0, "c": 1.0}, bandwidth=MIB / 5)
    slow = {way: replace(link, copying=0.0) for way, link in plain.links.items()}
    plain = replace(plain, links=slow)
    shared = {(a, b): replace(x, media=(f"{a} up", f"{b} down")) for (a, b), x in slow.items()}
    table = replace(plain, links=shared)
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    servers = tuple(Server(name) for name in plain.devices)
    members = tuple(Member(name, "d", server=name) for name in plain.devices)
    cluster = Cluster(members, servers=servers, network=Topology(0.0, 1e6, "switch"))
    groups, steps_s = (("a",), ("b",), ("c",)), []
    for schedule in ("1f1b", "gpipe"):
        proposal = Proposal((3, 5), groups, schedule, 4)
        plan = plan_by({4: table}, proposal, 16)
        assert plan.step_s == pytest.approx(simulate(plan, plain, cluster).step_s, rel=1e-9)
        steps_s.append(plan.step_s / plan_by({4: plain}, proposal, 16).step_s)
        assert measured_media(plan, table) == ["a down", "a up", "b down", "b up", "c down", "c up"]
    assert max(steps_s) > 1.01
    assert min(steps_s) >= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("per_pair", [False, True])
def test_a_shared_card_is_found_in_a_network_once(tmp_path: Path, per_pair: bool) -> None:
    """The messages of a host share its card, or each has its own way. A second profile measures
    nothing."""
    variables = {"HETPIPE_SECRET": "a secret of the tests alone", "HETPIPE_CACHE": str(tmp_path)}
    with network(3, tmp_path, Shape("400mbit", per_pair)) as net:
        address, result = f"{net.address('h0')}:29400", tmp_path / "result.json"
        script = [sys.executable, measured.__file__, address, "3", str(result)]
        started = {"h0": net.start("h0", *script, **variables)}
        for host in net.hosts[1:]:
            agent = (*script[:1], "-m", "hetpipe", "agent", "--meet", address, "--name", host)
            started[host] = net.start(host, *agent, **variables)
        ends = net.wait(started, 200.0)
    words = "".join(f"\n--- {host}: {end.status}\n{end.words}" for host, end in ends.items())
    assert ends["h0"].status == 0, words
    first, again = json.loads(result.read_text())
    assert again["links"] == first["links"]
    assert first["loads"] > again["loads"] == 0
    for source, target, label, media in first["links"]:
        here, there = (member.partition("/")[0] for member in (source, target))
        assert media == ([f"{here} up"] if here != there and not per_pair else []), words
        assert label == ("inferred" if here != there and "#1" in source + target else "measured")
