"""Times of hosts whose clocks differ are shown on the clock of the controller."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from agents import SECRET, end, free_address, patched_secret, start_agent
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.cluster import Cluster
from hetpipe.cluster.topology import Link
from hetpipe.crew.crew import Crew
from hetpipe.hosts.connection import Clocks
from hetpipe.report.trace import write_trace
from hetpipe.simulate.timeline import Timeline

AHEAD_S = 3600
OTHER_CLOCK = "unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child"
"""Begins a command whose process has another monotonic clock."""
LATENCY_S = 0.03
X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


@cache
def clocks_may_differ() -> bool:
    try:
        return subprocess.run([*OTHER_CLOCK, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """Yield a cluster of two hosts; the clock of the second is an hour ahead."""
    if not clocks_may_differ():
        pytest.skip("only root may give a process another clock, by unshare --time")
    address = free_address()
    agent = start_agent("--meet", address, "--name", "h1", before=OTHER_CLOCK)
    with patched_secret(SECRET):
        devices = ["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
        cluster = Cluster.hosts(address, 2, devices=devices, name="h0", limit_s=60)
    yield cluster
    assert cluster.connections is not None
    cluster.connections.close()
    end(agent)


def timeline_of(cluster: Cluster) -> Timeline:
    """Return the timeline of a step in a pipeline of two stages."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with Crew.start(cluster) as crew, pipeline(
        crew, model, nn.functional.cross_entropy, (X, Y), cluster.ids,
        optimizer=hp.optim.sgd(0.1), microbatches=2,
    ) as pipe:  # fmt: skip
        pipe.step(X, Y)
        pipe.step(X, Y)
        return pipe.timeline


def test_spans_and_emulated_links_between_clocks_an_hour_apart(
    apart: Cluster, tmp_path: Path
) -> None:
    links = {frozenset(apart.ids): Link(LATENCY_S, None)}
    timeline = timeline_of(replace(apart, links=links))
    connections = apart.connections
    assert connections is not None
    clock = connections.others["h1"].connection.clock
    assert abs(clock.ahead_s - AHEAD_S) <= clock.error_s < 0.1
    assert 0 < timeline.clock_error_s < 0.1
    near_s = 2 * timeline.clock_error_s  # of the spans, and of the times of delivery
    spans = {str(span.action): span for span in timeline.spans}
    for sent, received, worked in [("0SF0", "1RF0", "1F0"), ("1SB1", "0RB1", "0B1")]:
        arrival_s = spans[sent].start_s + LATENCY_S
        assert arrival_s - near_s < spans[received].start_s < AHEAD_S / 2
        assert spans[received].end_s <= spans[worked].start_s
    assert 2 * LATENCY_S - near_s < timeline.total_s < AHEAD_S / 2
    text = f"measured, clocks of hosts within {1e3 * timeline.clock_error_s:.2f} ms"
    assert timeline.title == text
    assert text in timeline._repr_html_()
    write_trace(tmp_path / "trace.json", [timeline])
    assert text in (tmp_path / "trace.json").read_text()
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_timeline_of_one_host_has_no_error(apart: Cluster) -> None:
    local = Cluster.local(devices=["numpy:cpu:0", "numpy:cpu:0"])
    timeline = timeline_of(local)
    assert timeline.clock_error_s == 0.0
    assert timeline.title == "measured"
    assert "clock_error_s" not in timeline.to_json()


def test_the_difference_follows_a_drift() -> None:
    """Beat each second for an hour; the other clock gains 100 us in each second."""
    clocks, gain = Clocks(), 1e-4
    assert not clocks.known
    assert clocks.at(0.0).error_s == float("inf")
    for beat in range(3600):
        trip_s = 1e-4 if beat % 8 == 0 else 5e-3  # most round trips are slow
        sent_s = float(beat)
        clocks.add(sent_s, (1 + gain) * (sent_s + 0.7 * trip_s), sent_s + trip_s)
        now_s = sent_s + 0.5
        clock = clocks.at(now_s)
        assert abs(clock.ahead_s - gain * now_s) <= clock.error_s < 6e-3
    assert clocks.at(now_s + 600).error_s > 0.25  # the error grows while no sign of life comes
