"""torch's pipeline as a row of the benchmark trains the same model, but with untied weights."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import distributed

from hetpipe.bench.bench import Task
from hetpipe.bench.peer import PeerTorch, cores_of, even_cuts, refusal, untie
from hetpipe.bench.rows import Pace, PeerRow
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.cluster.member import available_cores
from hetpipe.errors import HetpipeError
from hetpipe.train.eager import Eager
from hetpipe.zoo import load_workload
from hetpipe.zoo.load import optimizer_of

MODEL = "small_text:workload"
ROWS = 16
PACE = Pace(warm_up=3, timed=2)


@pytest.fixture(autouse=True)
def _with_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch was built without gloo")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)  # for the peer's processes
    monkeypatch.syspath_prepend(here)


def task(cluster: Cluster) -> Task:
    workload = load_workload(MODEL)
    captured = Captured(workload.model, workload.loss_fn, next(workload.batches(ROWS, 0)))
    return Task(MODEL, workload, captured, cluster, ROWS, seed=0, pace=PACE)


@pytest.fixture
def two() -> Cluster:
    """A cluster with one worker on each of two cores."""
    cores = available_cores()
    if len(cores) < 2:
        pytest.skip("a pipeline needs two cores")
    return Cluster(tuple(Member(f"m{n}", "pytorch:cpu:0", (cores[n],)) for n in range(2)))


@pytest.mark.parametrize(
    ("stages", "cuts"), [(1, []), (2, ["c"]), (3, ["b", "c"]), (4, ["b", "c", "d"])]
)
def test_cuts_share_blocks_evenly(stages: int, cuts: list[str]) -> None:
    assert even_cuts(["a", "b", "c", "d"], stages) == cuts


def test_untied_weights_are_separate_equal_tensors() -> None:
    model = load_workload(MODEL).model
    untie(model)
    assert model.head.weight is not model.embedding.tokens.weight
    assert torch.equal(model.head.weight, model.embedding.tokens.weight)


@pytest.mark.slow
def test_the_row_trains_like_the_untied_model(two: Cluster) -> None:
    with closing(PeerRow(task(two), [5, 8])) as row:
        row.measure()
        assert row.microbatches == 8, "16 samples cannot be cut into 5 equal micro-batches"
        assert row.rate > 0
        found = row._torch.loss
    workload = load_workload(MODEL)
    untie(workload.model)
    eager = Eager(workload.model, workload.loss_fn, optimizer_of(workload))
    count = (1 + 1) + (3 + 2)  # first to choose M, then to measure
    losses = [eager.step(x, y, (2,) * 8) for x, y in islice(workload.batches(ROWS, 0), count)]
    assert found == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < losses[0] - 0.05, "learns, so that the comparison says something"


@pytest.mark.slow
def test_a_dead_process_ends_the_row(two: Cluster) -> None:
    with (
        closing(PeerTorch("small_text:broken", ROWS, 0, cores_of(two))) as peer,
        pytest.raises(HetpipeError, match=r"hetpipe\.bench\.peer ended with exit status 1"),
    ):
        peer.step_s(8, 1, warm_up=1)


def test_a_peer_needs_processors_at_their_true_speed(two: Cluster) -> None:
    workload, (one, other) = load_workload(MODEL), two.members
    assert refusal(workload, two, ROWS, [8]) == ""
    slow = Cluster((one, replace(other, speed=0.5)))
    linked = replace(two, links={frozenset(two.ids): Link(latency_s=1e-3)})
    assert "no speeds" in refusal(workload, slow, ROWS, [8])
    assert "no links" in refusal(workload, linked, ROWS, [8])
    assert "only on processors" in refusal(
        workload, Cluster((one, replace(other, cores=()))), ROWS, [8]
    )
    assert "needs 1 stages, one per core" in refusal(workload, Cluster((one,)), ROWS, [8])
    assert "16 samples do not make 1, 5 equal" in refusal(workload, two, ROWS, [1, 5])
    assert "does not name blocks" in refusal(replace(workload, blocks=()), two, ROWS, [8])
