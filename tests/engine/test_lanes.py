"""Forwards and backwards at the same time: live micro-batches, shared devices, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captures import shared
from crews import UNLIKE, Crews
from engine_backends import FaultyBackend
from models import MLP
from pipelines import pipeline
from plans import unpriced
from reference import check_close, train
from slept import SleptBackend
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.papers.overhead import empty_stage
from hetpipe.papers.sleeping import SharedSpeed
from hetpipe.pipeline.fit import check_lanes
from hetpipe.schedule.action import Message
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.sdk.host.registry import get_backend, register_backend
from hetpipe.wire.transport import EdgeClosedError
from hetpipe.worker.lanes import HandOver, walk

register_backend(SleptBackend)
register_backend(FaultyBackend)
STAGES, MICROBATCHES = 3, 8


@pytest.fixture
def sleepers(crews: Crews) -> Crew:
    """A crew with stages that compute nothing but take time."""
    crew = crews([f"slept:2,4:{n}" for n in range(STAGES)])
    weights = {f"w{n}": np.zeros((), np.float32) for n in range(STAGES)}
    crew.load([empty_stage(n, STAGES) for n in range(STAGES)], list(crew.infos), weights)
    return crew


def request(microbatches: int, in_flight: list[int] | None = None) -> StepRequest:
    schedule = generate("fbp", STAGES, microbatches, in_flight=in_flight)
    feed = {"x": np.zeros((1, 1), np.float32)}
    ones = (1,) * microbatches
    return StepRequest(schedule, ones, [feed] * microbatches, ones, {}, 1, grad_scale=1.0)


@pytest.mark.parametrize("in_flight", [None, [3, 2, 1]])
@pytest.mark.parametrize("microbatches", [2, 8])
def test_microbatches_in_flight(
    sleepers: Crew, microbatches: int, in_flight: list[int] | None
) -> None:
    """Stage n holds min(2(N-n), M) micro-batches, as in table 1 of BaPipe, or the given bound."""
    bounds = in_flight or [2 * (STAGES - n) for n in range(STAGES)]
    asked = request(microbatches, in_flight)
    found = np.max([sleepers.step(asked).most_in_flight for _ in range(4)], axis=0)
    assert list(found) == [min(bound, microbatches) for bound in bounds]
    assert list(found) == max_in_flight(asked.schedule)


def test_a_timeline_has_a_row_per_lane_and_passes_overlap(sleepers: Crew) -> None:
    timeline = sleepers.step(request(MICROBATCHES)).timeline
    assert timeline.workers[:3] == ("m0 lane 0", "m0 lane 1", "m1 lane 0")
    ops = [{s.action.op.value for s in timeline.spans if s.worker == n} for n in range(4)]
    assert ops == [{"F", "SF"}, {"RB", "B", "U"}, {"RF", "F", "SF"}, {"RB", "B", "SB", "U"}]
    last = [s for s in timeline.spans if s.action.stage == STAGES - 1]
    ahead = [s for s in last if s.action.op.value == "F"]
    back = [s for s in last if s.action.op.value == "B"]
    overlaps = [min(f.end_s, b.end_s) - max(f.start_s, b.start_s) for f in ahead for b in back]
    assert sum(overlap > 1e-3 for overlap in overlaps) >= MICROBATCHES // 2


def test_simultaneous_passes_share_a_sleeping_device() -> None:
    """Two simultaneous passes of 30 s and 60 s: the first ends at 60 s, the second at 90 s."""
    now_s = [0.0]
    speed = SharedSpeed(lambda: now_s[0])
    first, second = speed.begin(30.0), speed.begin(60.0)
    found = []
    for now_s[0] in (59.0, 60.0, 89.0, 90.0):
        found.append((speed.reached(first, 0.0), speed.reached(second, 0.0)))
    assert found == [(False, False), (True, False), (True, False), (True, True)]
    assert speed.reached(second, 0.0)


def test_a_late_pass_shares_the_device_from_its_start() -> None:
    """A pass ends at its time even if that is noticed late.

    From that end on, the remaining pass has the whole device.
    """
    now_s = [0.0]
    speed = SharedSpeed(lambda: now_s[0])
    first = speed.begin(30.0)
    now_s[0] = 20.0
    second = speed.begin(30.0)
    now_s[0] = 49.0  # the first ended at 40, when the second had 20 left
    assert speed.reached(first, 0.0)
    assert speed.reached(second, 11.0)
    assert not speed.reached(second, 10.5)


def planned() -> tuple[Captured, hp.Plan, CostTable]:
    data = (torch.zeros(8, 20), torch.zeros(8, dtype=torch.int64))
    torch.manual_seed(0)
    captured = shared(MLP(), F.cross_entropy, data)
    return captured, *unpriced(captured, ["m0", "m1"], "fbp", 8, 4)


def test_a_device_with_one_queue_is_refused() -> None:
    _, plan, _ = planned()
    (two,) = get_backend("numpy").discover()
    one = replace(two, id="toy:cpu:0", capabilities=replace(two.capabilities, queues=1))
    check_lanes(plan, {"m0": two, "m1": two})
    message = (
        r"fbp runs 2 passes of a stage at once, and m1 \(toy:cpu:0\) runs 1: choose another "
        "schedule, such as 1f1b"
    )
    with pytest.raises(HetpipeError, match=message):
        check_lanes(plan, {"m0": two, "m1": one})


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_failure_in_one_lane_ends_the_run(transport: str) -> None:
    """The third pass on m1 raises, in either lane, while the other workers wait for its result."""
    members = (Member("m0", "numpy:cpu:0"), Member("m1", "faulty:raise:0"))
    captured, plan, costs = planned()
    with hp.Pipeline(
        MLP(), F.cross_entropy, (torch.zeros(8, 20), torch.zeros(8, dtype=torch.int64)),
        cluster=Cluster(members, transport=transport), captured=captured, plan=plan, costs=costs,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        begin_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"worker 'm1' .* failed at 1.*boom 42"):
            pipe.step(torch.zeros(8, 20), torch.zeros(8, dtype=torch.int64))
        assert time.monotonic() - begin_s < 10


class Normalized(nn.Module):
    """Batch norm: forwards write the running statistics while backwards write gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def sum_and_count(found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(found, wanted, reduction="sum"), torch.tensor(float(len(wanted)))


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, sum_and_count], ids=["mean", "sum and count"])
def test_torch_trains_batch_norm_in_two_lanes(crews: Crews, loss_fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Normalized()
    data = [(torch.randn(64, 20), torch.randint(0, 5, (64,))) for _ in range(3)]
    expected = train(
        model, F.cross_entropy, data, MICROBATCHES, lambda p: torch.optim.SGD(p, lr=0.1)
    )
    with pipeline(
        crews(UNLIKE), model, loss_fn, data[0], ("m1", "m3"), "fbp", MICROBATCHES,
        optimizer=hp.optim.sgd(lr=0.1), clip_norm=1e9,
    ) as pipe:  # fmt: skip
        losses = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)


def test_lanes_wake_each_other_and_the_first_error_counts() -> None:
    hand_over, told = HandOver(), []
    message = Message(0, 0, "K", 3)

    def waits() -> None:
        hand_over.take(message)
        hand_over.take(message)  # `fails` never gives a second message

    def fails() -> None:
        hand_over.give(message)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        walk([waits, fails], hand_over, lambda error: told.append(str(error)))
    assert told == ["boom"]
    with pytest.raises(EdgeClosedError):
        hand_over.take(message)
