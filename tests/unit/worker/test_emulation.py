"""Emulated speed: the time of an action, and workers that share a core."""

from __future__ import annotations

import time

import pytest

from hetpipe.cluster import Cluster, Member
from hetpipe.worker.emulation import OWN_SPEED, Emulation, Moment


def compute(seconds: float) -> None:
    """Occupy a core for this much CPU time of the process."""
    begin_s = time.process_time()
    while time.process_time() - begin_s < seconds:
        pass


def test_an_action_takes_as_long_as_on_a_slower_device() -> None:
    begin = Moment.now()
    time.sleep(0.02)
    end_s = Emulation(0.5).stretch(begin)
    assert end_s - begin.clock_s >= 0.04
    assert OWN_SPEED.stretch(begin) >= end_s


def test_a_wait_before_an_action_does_not_count() -> None:
    begin = Moment(time.monotonic() - 10.0, time.process_time()).later(10.0)
    assert Emulation(0.5).lasts_s(begin) < 1.0


def test_only_cpu_time_counts_on_a_shared_core() -> None:
    """The sleep stands for the turns of other workers on the core."""
    begin = Moment.now()
    time.sleep(0.1)
    compute(0.01)
    shared, own = Emulation(0.25, shares_core=True), Emulation(0.25)
    assert 0.04 <= shared.lasts_s(begin) < own.lasts_s(begin)
    assert own.lasts_s(begin) >= 0.44


def test_no_action_waits_for_the_past() -> None:
    now_s = time.monotonic()
    for shares_core in (False, True):
        assert Emulation(0.5, shares_core).wait_until(now_s - 1.0) >= now_s
        assert Emulation(0.5, shares_core).wait_until(now_s + 0.01) >= now_s + 0.01


@pytest.mark.parametrize(
    ("cores", "sharing"),
    [
        ([(0,), (1,)], set()),
        ([(0,), (0,), (1,)], {"0", "1"}),
        ([(0, 1), (1,), ()], {"0", "1"}),
        ([(), ()], set()),
    ],
)
def test_members_pinned_to_the_same_cores_share_them(
    cores: list[tuple[int, ...]], sharing: set[str]
) -> None:
    members = tuple(Member(str(n), "x", own) for n, own in enumerate(cores))
    assert Cluster(members).members_sharing_cores == sharing
