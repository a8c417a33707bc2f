"""When hetpipe looks for lost members."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.errors import HetpipeError
from hetpipe.pipeline import absent
from hetpipe.pipeline.absent import FIRST_S, GROWTH, LONGEST_S, OPEN_S, Absent

CLUSTER = Cluster((Member("m0", "numpy:cpu:0"), Member("m1", "numpy:cpu:0")))
CLOCK_S = 1.0


class Looks:
    """A clock, and a member that comes back at a moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s, self.back_s = 0.0, 0.0
        self.times_s: list[float] = []
        self.absent = Absent(CLUSTER)
        patch.setattr(absent, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(absent, "Workers", SimpleNamespace(start=self._start))

    def _start(self, *args: Any, **options: Any) -> Any:
        self.times_s.append(self.now_s)
        if self.now_s < self.back_s:
            raise HetpipeError("the device is away")
        none = lambda: None  # noqa: E731
        return SimpleNamespace(have_replied=True, be_quiet=none, close=none)

    def found_s(self, away_s: float) -> float:
        """Lose a member for some seconds, and return the seconds until it has joined."""
        begin_s = self.now_s
        self.back_s = begin_s + away_s
        self.absent.lose(["m1"])
        while not self.absent.look(CLUSTER):
            self.now_s += CLOCK_S
        self.absent.join(CLUSTER)
        return self.now_s - begin_s


@pytest.mark.parametrize("away_s", [3.0, 30.0, 200.0, 3600.0, 1e5])
def test_a_return_is_seen_soon(away_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    late_s = looks.found_s(away_s) - away_s
    assert late_s <= max(FIRST_S, min(GROWTH * away_s, LONGEST_S)) + 2 * CLOCK_S
    assert len(looks.times_s) < 5 + away_s / FIRST_S
    assert len(looks.times_s) < 30 + away_s / LONGEST_S


def test_a_member_that_has_worked_is_sought_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    for _ in range(3):
        assert looks.found_s(0.0) <= FIRST_S + 2 * CLOCK_S
        looks.now_s += 1000.0


def test_a_member_that_is_soon_lost_again_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    for number in range(4):
        assert looks.found_s(0.0) >= 2**number * FIRST_S
        looks.now_s += 20.0


def test_a_device_that_never_opens_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its look must not keep other members from theirs."""
    looks, closed, trio = Looks(monkeypatch), [], Cluster.with_ids(["m0", "m1", "m2"])

    def start(cluster: Cluster, **options: Any) -> Any:
        (member,) = cluster.ids
        return SimpleNamespace(
            have_replied=member == "m2", be_quiet=lambda: None,
            close=lambda: closed.append(member),
        )  # fmt: skip

    monkeypatch.setattr(absent, "Workers", SimpleNamespace(start=start))
    looks.absent = Absent(trio)
    looks.absent.lose(["m1", "m2"])
    while not looks.absent.look(trio):
        looks.now_s += CLOCK_S
        assert looks.now_s < FIRST_S + OPEN_S + 5 * CLOCK_S
    assert closed == ["m1", "m2"]
    assert looks.absent.back == {"m2"}
    assert looks.absent._due_s.keys() == {"m1"}


def test_a_member_that_is_back_is_lost_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other members could not reach its host, and so would never be back."""
    looks = Looks(monkeypatch)
    first, second = CLUSTER.members
    looks.absent = Absent(replace(CLUSTER, members=(first, replace(second, host="h1"))))
    looks.absent.lose(["m1"])
    while not looks.absent.look(CLUSTER):
        looks.now_s += CLOCK_S
    assert looks.absent.back == {"m1"}
    others = {"h1": SimpleNamespace(name="h1", lost=True)}
    present: Any = SimpleNamespace(connections=SimpleNamespace(others=others))
    assert not looks.absent.look(present)
    assert not looks.absent.back
