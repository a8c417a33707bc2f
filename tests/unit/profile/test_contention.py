"""Costs measured beside other work are stored with a mark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MLP
from tables import make_table

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.plan.interval import interval_s
from hetpipe.plan.planner import make_plan
from hetpipe.profile import contention
from hetpipe.profile.contention import ContentionWarning, Usage, foreign_share, usage
from hetpipe.profile.estimate import Series
from hetpipe.profile.measure import profile

FIELDS = "0 0"  # the first fields include guest time


def at(process: int, at_s: float, own_s: float, host: str = "a", **cores_s: float) -> Usage:
    return Usage(host, str(process), at_s, own_s, {int(k[1:]): v for k, v in cores_s.items()})


def test_the_share_of_other_processes() -> None:
    """Two processes on separate cores for 10 s; another process disturbs one of them for 3 s."""
    before = [at(1, 100.0, 7.0, c0=50.0), at(2, 100.0, 1.0, c1=20.0)]
    after = [at(1, 110.0, 16.0, c0=59.0), at(2, 110.0, 3.0, c1=25.0)]
    assert foreign_share(before, after) == pytest.approx(3 / 20)


def test_a_shared_core_and_threads_of_one_process_count_once() -> None:
    """Check it on two hosts; the first has two processes on one core, and two members in one
    process."""
    before = [at(1, 0.0, 0.0, c0=0.0)] * 2 + [at(2, 0.0, 0.0, c0=0.0)]
    after = [at(1, 10.0, 4.0, c0=9.0)] * 2 + [at(2, 10.0, 3.0, c0=9.0)]
    assert foreign_share(before, after) == pytest.approx(2 / 10)
    before.append(at(1, 0.0, 0.0, "b", c0=0.0, c1=0.0))
    after.append(at(1, 10.0, 10.0, "b", c0=10.0, c1=5.0))
    assert foreign_share(before, after) == pytest.approx(7 / 30)


def test_the_share_is_0_without_cores_and_never_negative() -> None:
    assert foreign_share([at(1, 0.0, 0.0, c0=0.0)], [at(1, 1.0, 1.0, c0=0.99)]) == 0.0
    assert foreign_share([at(1, 0.0, 0.0)], [at(1, 1.0, 0.5)]) == 0.0


def test_cores_of_this_process_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time and waiting for disks are no work; time taken by a hypervisor is."""
    core = min(os.sched_getaffinity(0))
    lines = [f"cpu  9 9 9 9 9 9 9 9 {FIELDS}", f"cpu{core} 100 20 30 5000 700 4 6 40 {FIELDS}"]
    lines += [f"cpu4096 100 20 30 5000 700 4 6 40 {FIELDS}", "intr 5 6 7"]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(contention, "STAT", tmp_path / "stat")
    found = usage()
    assert found.cores_s == {core: 200 / os.sysconf("SC_CLK_TCK")}
    assert found.process.endswith(f":{os.getpid()}")
    monkeypatch.setattr(contention, "STAT", tmp_path / "none")
    assert usage().cores_s == {}


@pytest.mark.skipif(not contention.STAT.exists(), reason="this system has no /proc/stat")
def test_other_processes_are_seen() -> None:
    """Other processes compute on all cores while this one sleeps."""
    spin = "while True: pass"
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(cores)]
    try:
        before = usage()
        time.sleep(1.0)
        after = usage()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert foreign_share([before], [after]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.3, 0.5), (0.3, 0.05)], ids=["both", "one round quiet"])
def test_disturbed_costs_are_kept_with_a_mark(
    shares: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disturbed costs give a warning at each use, until they are measured again."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    told = iter(shares)
    monkeypatch.setattr(contention, "foreign_share", lambda before, after: next(told))
    torch.manual_seed(0)
    example = (torch.randn(8, 20), torch.randint(0, 5, (8,)))
    captured = Captured(MLP(), F.cross_entropy, example)
    cluster = Cluster((Member("a", "numpy:cpu:0"),), transport="local")
    with Crew.start(cluster) as crew, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = profile(captured, crew, hp.optim.sgd(0.1), [4])[4]
        assert np.isfinite([layer.forward_s for layer in table.devices["a"].layers]).all()
        disturbed = min(shares) > contention.LIMIT
        assert len(list(tmp_path.glob("costs/*.json"))) == 1
        assert table.contention == (0.3 if disturbed else 0.0)
        assert CostTable.from_json(table.to_json()) == table
        if not disturbed:
            assert not caught
            return
        (warned,) = caught
        assert warned.category is ContentionWarning
        assert "took 30% of the cores (costs are reliable up to 10%" in str(warned.message)
        assert "micro-batches of 4" in str(warned.message)
        assert "unreliable here; measure again" in str(warned.message)
        kept = profile(captured, crew, hp.optim.sgd(0.1), [4])[4]  # measures nothing
        assert kept.contention == 0.3
        assert str(caught[1].message) == str(warned.message)
        told = iter((0.0, 0.0))
        again = profile(captured, crew, hp.optim.sgd(0.1), [4], again=True)[4]
        assert again.contention == 0.0
        assert replace(again, devices=table.devices, links=table.links, contention=0.3,
                       step_overhead_s=table.step_overhead_s) == table  # fmt: skip
        stored = profile(captured, crew, hp.optim.sgd(0.1), [4])[4]
        assert stored.contention == 0.0
        assert len(caught) == 2


def test_the_interval_widens_with_contention() -> None:
    table = make_table({"a": 1.0, "b": 1.0})
    plan = make_plan(table, ["a", "b"], mini_batch=16, microbatches=4, schedule="1f1b")
    spreads = {id: replace(cost, spread=0.01) for id, cost in table.devices.items()}
    quiet = replace(table, devices=spreads)
    half = replace(quiet, contention=0.5)
    narrow, wide = (interval_s(plan, each, as_planned=True) for each in (quiet, half))
    assert narrow is not None
    assert wide is not None
    assert narrow[1] / plan.step_s < 1.1
    assert wide[0] / plan.step_s == pytest.approx(0.5, abs=0.02)
    assert wide[1] / plan.step_s == pytest.approx(2.0, abs=0.05)


@pytest.mark.slow
def test_each_half_measures_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half is disturbed and does not count, though it measures all layers but one
    well."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    shares = iter((0.5, 0.0))
    monkeypatch.setattr(contention, "foreign_share", lambda before, after: next(shares))
    monkeypatch.setattr(Series, "uncertain", lambda own, size: [0] if own.beside else [])
    example = (torch.randn(8, 20), torch.randint(0, 5, (8,)))
    captured = Captured(MLP(), F.cross_entropy, example)
    cluster = Cluster((Member("a", "numpy:cpu:0"),), transport="local")
    with Crew.start(cluster) as crew:
        table = profile(captured, crew, hp.optim.sgd(0.1), [4])[4]
    layers = table.devices["a"].layers
    assert len(layers) > 1
    assert min(layer.forward_s for layer in layers) > 0
