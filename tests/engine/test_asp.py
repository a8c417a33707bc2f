"""Asynchronous data parallelism equals one loop whose gradients use older weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import delayed
import numpy as np
import pytest
import torch
from crews import ALIKE, UNLIKE, Crews
from delayed import (
    ADAM,
    MINI_BATCHES,
    SGD,
    Choice,
    Momentum,
    batch,
    capture,
    distance,
    loss_fn,
    network,
    task,
    train_pipeline,
)
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.capture.program import PARAM, STATE
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

MEMBERS = 3
DEVICES = ("numpy:cpu:0",) * MEMBERS


def parallel(
    crew: Crew, replicas: int, optimizer: Any, microbatches: int = 1, **options: Any
) -> hp.Pipeline:
    """Replicate the whole model on the first `replicas` members."""
    of_model = options.pop("task", None) or task()
    members = [tuple(crew.infos)[:replicas]]
    return pipeline(
        crew, *of_model, members, "asp", microbatches, in_flight=[1], optimizer=optimizer,
        **options,
    )  # fmt: skip


def delay(updates: int) -> Choice:
    """Choose the weights from `updates` updates before the latest."""
    return lambda n, b: (max(0, b - updates), 0)


def expected_weights(
    updates: int, optimizer: Any, count: int = MINI_BATCHES, microbatches: int = 1
) -> list[delayed.Layer]:
    rule = delay(updates)
    return delayed.train(1, optimizer, rule, rule, count, microbatches).last


def assert_replicas_are_equal(crew: Crew, replicas: int) -> None:
    for role in (PARAM, STATE):
        first, *others = (crew.read(role, replica=replica) for replica in range(replicas))
        assert first or role == STATE
        for other in others:
            assert all(np.array_equal(value, other[name]) for name, value in first.items())


@pytest.mark.wide
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("pair", [SGD, ADAM], ids=["sgd", "adam"])
def test_equals_the_sequential_reference(
    crew: Crew, replicas: int, microbatches: int, pair: Any
) -> None:
    pipe = parallel(crew, replicas, pair[0], microbatches)
    right = expected_weights(replicas - 1, pair[1], microbatches=microbatches)
    assert distance(train_pipeline(pipe), right) < 1e-5


@pytest.mark.parametrize("pair", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_wrong_delay_is_detected(crew: Crew, replicas: int, pair: Any) -> None:
    state = train_pipeline(parallel(crew, replicas, pair[0]))
    for wrong in (replicas - 2, replicas):
        assert distance(state, expected_weights(wrong, pair[1])) > 1e-3


@pytest.mark.parametrize("replicas", [2, 3])
def test_all_replicas_are_the_same(crew: Crew, replicas: int) -> None:
    with parallel(crew, replicas, ADAM[0]) as pipe:
        for count in (1, 2, 7):
            list(pipe.run(batch(b) for b in range(count)))
            pipe.flush()
            assert_replicas_are_equal(crew, pipe.plan.replicas[0])


@pytest.mark.parametrize("replicas", [2, 3])
def test_flushed_in_the_middle(crew: Crew, replicas: int) -> None:
    """After a flush, training begins again with gradients of the current weights."""
    counts = (4, 1, 8)
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]

    def rule(n: int, b: int) -> tuple[int, float]:
        begin = max(end for end in ends if end <= b)
        return max(begin, b - replicas + 1), 0

    with parallel(crew, replicas, ADAM[0]) as pipe:
        for lo, hi in pairwise(ends):
            list(pipe.run(batch(b) for b in range(lo, hi)))
            pipe.flush()
        state = pipe.state_dict()
    assert distance(state, delayed.train(1, ADAM[1], rule, rule, ends[-1]).last) < 1e-5


def test_resumed_and_evaluated(crew: Crew, tmp_path: Any) -> None:
    with parallel(crew, 3, ADAM[0]) as pipe:
        list(pipe.run(batch(b) for b in range(5)))
        pipe.save(tmp_path)
        list(pipe.run(batch(b) for b in range(5, 12)))
        state, loss = pipe.state_dict(), pipe.evaluate([batch(13)]).loss
    with parallel(crew, 3, ADAM[0], checkpoint=tmp_path) as pipe:
        list(pipe.run(batch(b) for b in range(5, 12)))
        assert pipe.evaluate([batch(13)]).loss == loss
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, state[name])
        assert_replicas_are_equal(crew, pipe.plan.replicas[0])


def test_a_changing_learning_rate(crew: Crew) -> None:
    """The learning rate is the update's, even if another replica ran the mini-batch."""

    class Falling(Momentum):
        def update(self, w, state, grad, step):  # type: ignore[no-untyped-def]
            self.lr = 0.05 / step
            return super().update(w, state, grad, step)

    state = train_pipeline(parallel(crew, 2, hp.optim.sgd(lambda t: 0.05 / t, momentum=0.9)))
    assert distance(state, expected_weights(1, Falling(0.05))) < 1e-5


def test_clipped(crew: Crew) -> None:
    """Each mini-batch's gradient is clipped by its own norm, equally on all replicas."""
    bound = 0.1
    passes = delayed._pass

    def clipped(*args: Any) -> None:
        passes(*args)
        grads = [value for layer in args[4] for value in layer]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for grad in grads:
            grad.mul_(min(1.0, bound / (float(norm) + 1e-6)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delayed, "_pass", clipped)
        right = expected_weights(1, SGD[1])
    with parallel(crew, 2, SGD[0], clip_norm=bound, clip_each=True) as pipe:
        list(pipe.run(batch(b) for b in range(MINI_BATCHES)))
        state = pipe.state_dict()
        assert_replicas_are_equal(crew, pipe.plan.replicas[0])
    assert distance(state, right) < 1e-5
    assert distance(state, expected_weights(1, SGD[1])) > 1e-3


def test_sums_with_counts(crew: Crew) -> None:
    """Every replica divides the gradient of a mini-batch by that mini-batch's count."""

    def summed(found: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = (y > 0).any(1).double()
        return ((found - y).square().sum(1) * kept).sum(), kept.sum()

    def masked(found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = summed(found, y)
        return total / count

    counts = {int(summed(y, y)[1]) for _, y in map(batch, range(12))}
    assert len(counts) > 1  # otherwise a wrong count would go unnoticed

    model, rate = network(), 0.03
    versions = [[p.detach().clone() for p in model.parameters()]]
    for b in range(12):
        with torch.no_grad():
            for p, old in zip(model.parameters(), versions[max(0, b - 1)], strict=True):
                p.copy_(old)
        x, y = batch(b)
        grads = torch.autograd.grad(masked(model(x), y), list(model.parameters()))
        pairs = zip(versions[-1], grads, strict=True)
        versions.append([w - rate * g for w, g in pairs])

    of_sums = network(), summed, batch(0)
    with parallel(crew, 2, hp.optim.sgd(lr=rate), task=of_sums) as pipe:
        list(pipe.run(batch(b) for b in range(12)))
        state = pipe.state_dict()
        assert_replicas_are_equal(crew, pipe.plan.replicas[0])
    for found, right in zip(state.values(), versions[-1], strict=True):
        assert float((found - right).abs().max() / right.abs().max()) < 1e-5


@pytest.mark.parametrize("transport", ["shared-memory", "distributed"])
def test_every_transport_gives_the_same(crew: Crew, crews: Crews, transport: str) -> None:
    state = train_pipeline(parallel(crew, 3, SGD[0]), 10)
    found = train_pipeline(parallel(crews(ALIKE, transport), 3, SGD[0]), 10)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_devices_of_different_kinds(crews: Crews) -> None:
    state = train_pipeline(parallel(crews(UNLIKE), 2, ADAM[0]))
    assert distance(state, expected_weights(1, ADAM[1])) < 1e-5


def test_batch_norm_statistics_come_from_the_first_replica(crew: Crew) -> None:
    """The statistics equal torch's over mini-batches 0, 2, 4, ... alone, for any weights."""

    def make() -> nn.Sequential:
        torch.manual_seed(1)
        width = delayed.WIDTHS[0]
        return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, delayed.WIDTHS[-1])).double()

    model = make()
    for b in range(0, 9, 2):
        model(batch(b)[0])
    with parallel(crew, 2, SGD[0], task=(make(), loss_fn, batch(0))) as pipe:
        list(pipe.run(batch(b) for b in range(9)))
        state = pipe.state_dict()
    for name, value in model.named_buffers():
        assert torch.allclose(state[name].double(), value.double()), name


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [None, [2]])
def test_a_pipeline_puts_a_replica_on_every_device(crew: Crew, replicas: list[int] | None) -> None:
    with hp.Pipeline(
        *task(), cluster=crew.cluster, crew=crew, captured=capture(),
        optimizer=SGD[0], schedule="asp", replicas=replicas,
    ) as pipe:  # fmt: skip
        count = MEMBERS if replicas is None else replicas[0]
        assert pipe.plan.replicas == (count,)
        assert (pipe.plan.weights, pipe.plan.microbatches) == ("stash", 1)
        assert pipe.plan.step_s > 0
        assert len(pipe.predicted.workers) == count
        losses = [result.loss for result in pipe.run(batch(b % 4) for b in range(40))]
        assert losses[-1] < losses[0]
        assert {span.action.op.value for span in pipe.timeline.spans} == {"F", "B", "SA", "RA", "U"}


def test_unsupported_options_are_refused(crew: Crew) -> None:
    def make(**options: Any) -> None:
        hp.Pipeline(
            *task(), cluster=crew.cluster, crew=crew, captured=capture(),
            optimizer=SGD[0], schedule="asp", **options,
        )  # fmt: skip

    with pytest.raises(HetpipeError, match=r"asp has 1 stage, .*cuts \[2\].*leave out cuts"):
        make(cuts=[2])
    with pytest.raises(HetpipeError, match=r"asp has 1 stage, .*replicas \[2, 1\].*one number"):
        make(replicas=[2, 1])
    with pytest.raises(HetpipeError, match=r"\[4\] need 4 devices, the cluster has 3"):
        make(replicas=[4])
    with pytest.raises(HetpipeError, match="weights='2bw' has nothing to choose from: use 'stash'"):
        make(weights="2bw")
    with pytest.raises(HetpipeError, match="clip_each=True"):
        make(clip_norm=1.0)
    with pytest.raises(HetpipeError, match="asp updates after each mini-batch"):
        make(accumulate=2)
