"""Impossible times are ignored with a warning, or refused; no plan uses them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.probe import Drift, Probe, drift
from hetpipe.cost.table import CostTable, DeviceCost, LayerCost
from hetpipe.crew.crew import Crew
from hetpipe.errors import CostError
from hetpipe.profile import clock, measure
from hetpipe.profile.clock import LONGEST_S, ClockWarning, Samples, since_s
from hetpipe.profile.links import measure_links
from hetpipe.profile.measure import profile
from hetpipe.worker.emulation import Emulation


@pytest.mark.parametrize("time_s", [math.nan, 0.0, -1e-3, math.inf, 3600.0])
def test_an_impossible_time_is_separated(time_s: float) -> None:
    samples = Samples.of([1e-3, time_s, 3e-3, 2e-3])
    assert (samples.median_s, len(samples.bad)) == (2e-3, 1)
    samples.check("a: a forward")
    Samples.of([time_s, 1e-3]).check("a: a forward")
    with pytest.raises(CostError, match=rf"a: a forward took {time_s} s, in 2 of 3 .*check the cl"):
        Samples.of([time_s, 1e-3, time_s]).check("a: a forward")
    with pytest.raises(CostError, match="in 1 of 1"):
        Samples.of([time_s]).check("a: a forward")


@pytest.mark.parametrize("jump_s", [-5.0, 3600.0, math.nan])
def test_no_emulated_speed_waits_for_a_jump(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tenth of the speed an hour would cause nine hours of waiting."""
    begin = clock.begin()
    monkeypatch.setattr(clock, "now_s", lambda: begin.clock_s + jump_s)
    begin_s = time.perf_counter()
    time_s = since_s(begin, Emulation(0.1))
    assert time_s == pytest.approx(jump_s, nan_ok=True)
    clock.catch_up(begin, time_s, Emulation(0.1))
    assert time.perf_counter() - begin_s < LONGEST_S


@cache
def perceptron() -> Captured:
    """Return the capture of a small model, made once for all tests."""
    return Captured(MLP(), F.cross_entropy, (torch.randn(8, 20), torch.randint(0, 5, (8,))))


def profile_by_clock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, now_s: Callable[[], float]
) -> CostTable:
    """Return a profile measured with this clock, on one device in this process."""
    monkeypatch.setenv("HETPIPE_CACHE", str(folder))
    captured = perceptron()
    with Crew.start(Cluster((Member("a", "numpy:cpu:0"),), transport="local")) as crew:
        monkeypatch.setattr(clock, "now_s", now_s)
        return profile(captured, crew, hp.optim.sgd(0.1), [4])[4]


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.0, -1e-3, math.nan, 3600.0])
def test_a_senseless_clock_is_refused(
    step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still, goes back, gives no number, or jumps by an hour at every reading."""
    reading_s = [1e6]

    def now_s() -> float:
        reading_s[0] += step_s
        return reading_s[0]

    with pytest.raises(CostError, match=r"numpy:cpu:0.*took .* s, .*check the clock") as caught:
        profile_by_clock(tmp_path, monkeypatch, now_s)
    assert ("nan" if math.isnan(step_s) else f"{step_s}") in str(caught.value)
    assert not list(tmp_path.glob("costs/*.json"))


@pytest.mark.slow
def test_some_jumps_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading advances the clock by a millisecond, and some by an hour, forward or back."""
    looks = [0]

    def now_s() -> float:
        looks[0] += 1
        return 1e-3 * looks[0] + 3600.0 * ((looks[0] // 11) % 2)

    # Each layer's times include the engine's part of an action, which a running clock measured.
    monkeypatch.setattr(measure, "engine_s", lambda crew, orders: {})
    with pytest.warns(ClockWarning, match=r"a \(numpy:cpu:0\): .* took .* which is impossible"):
        table = profile_by_clock(tmp_path, monkeypatch, now_s)
    for layer in table.devices["a"].layers:
        for time_s in (layer.forward_s, layer.backward_s):
            assert time_s == pytest.approx(1e-3, rel=1e-3) or time_s == 0.0


@pytest.mark.parametrize("time_s", [math.nan, -1.0])
def test_costs_are_numbers_of_0_or_more(time_s: float) -> None:
    with pytest.raises(CostError, match=f"a layer's backward_s is {time_s}"):
        LayerCost(1.0, time_s, 0.0)
    with pytest.raises(CostError, match=f"a layer's spread is {time_s}"):
        LayerCost(1.0, 1.0, 0.0, spread=time_s)


@pytest.mark.parametrize("time_s", [math.nan, 0.0, -1.0, math.inf])
def test_a_probe_must_take_time(time_s: float) -> None:
    with pytest.raises(CostError, match=f"a probe's product takes {time_s} s"):
        Probe(time_s, 1e-3, 0.0, 128, 1 << 20)
    with pytest.raises(CostError, match=f"a probe's pass takes {time_s} s"):
        Probe(1e-3, time_s, 0.0, 128, 1 << 20)


def test_a_drift_must_be_a_factor() -> None:
    cost = DeviceCost((LayerCost(1.0, 1.0, 0.0),), 0.0, 1, "ram")
    with pytest.raises(CostError, match=r"a drift of 0\.0"):
        cost.drifted(Drift(0.0, 1.0))
    with pytest.raises(CostError, match=r"probes of 128 rows .* cannot be compared"):
        drift(Probe(1.0, 1.0, 0.0, 128, 1), Probe(1.0, 1.0, 0.0, 256, 1))


def test_a_link_that_takes_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line through such times has no bandwidth, or one that is not a number."""
    members = (Member("a", "numpy:cpu:0"), Member("b", "numpy:cpu:0"))
    with Crew.start(Cluster(members, transport="local")) as crew:
        step = crew.step

        def timeless(request: Any) -> Any:
            result = step(request)
            spans = tuple(span._replace(start_s=0.0, end_s=0.0) for span in result.timeline.spans)
            return replace(result, timeline=replace(result.timeline, spans=spans))

        monkeypatch.setattr(crew, "step", timeless)
        with pytest.raises(CostError, match=r"a -> b: a tensor of 4096 bytes took 0\.0 s"):
            measure_links(crew)
