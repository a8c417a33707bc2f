"""Replicas that take mini-batches in turn equal a sequential reference that averages rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import delayed
import pytest
import torch
from crews import ALIKE, Crews
from delayed import (
    ADAM,
    MINI_BATCHES,
    SGD,
    Choice,
    batch,
    capture,
    distance,
    task,
    train_pipeline,
)
from pipelines import members_by_stage, pipeline

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.schedule.turns import noam


def open_round_robin(
    crew: Crew, replicas: Sequence[int], policy: str, optimizer: Any,
    depths: Sequence[int] | None = None, microbatches: int = 1, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline with `replicas[n]` replicas of stage n."""
    return pipeline(
        crew, *task(), members_by_stage(crew, replicas), "pipedream", microbatches, weights=policy,
        in_flight=depths or noam(replicas), optimizer=optimizer, **options,
    )  # fmt: skip


def delays(policy: str, replicas: Sequence[int], depths: Sequence[int]) -> tuple[Choice, Choice]:
    """Return the delays, in updates of the stage, as if each replica were a straight pipeline."""

    def seen(n: int, b: int) -> int:
        return max(0, b // replicas[n] - depths[n] + 1)

    rules: dict[str, tuple[Choice, Choice]] = {
        "stash": (lambda n, b: (seen(n, b), 0),) * 2,
        "vertical-sync": (lambda n, b: (seen(0, b) * replicas[0] // replicas[n], 0),) * 2,
        "pipeoptim": (
            lambda n, b: (seen(n, b), depths[n] - 1),
            lambda n, b: (b // replicas[n], 0),
        ),
    }
    return rules[policy]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("replicas", "deeper"),
    [((2, 1), 0), ((2, 1), 2), ((1, 2), 0), ((1, 2, 1), 0), ((3, 1), 1), ((2, 2), 0)],
    ids=str,
)
@pytest.mark.parametrize("policy", ["stash", "vertical-sync", "pipeoptim"])
@pytest.mark.parametrize("pair", [SGD, ADAM], ids=["sgd", "adam"])
def test_equals_the_sequential_reference(
    crew: Crew, replicas: tuple[int, ...], deeper: int, policy: str, pair: Any
) -> None:
    depths = [depth + deeper for depth in noam(replicas)]
    rules = delays(policy, replicas, depths)
    wanted = delayed.train(len(replicas), pair[1], *rules, MINI_BATCHES, replicas=replicas)
    pipe = open_round_robin(crew, replicas, policy, pair[0], depths)
    assert distance(train_pipeline(pipe, MINI_BATCHES), wanted.last) < 1e-5


def test_a_wrong_delay_is_detected(crew: Crew) -> None:
    forward, _ = delays("stash", (2, 1), noam((2, 1)))

    def late(n: int, b: int) -> tuple[int, float]:
        return max(0, forward(n, b)[0] - 1), 0

    wrong = delayed.train(2, SGD[1], late, late, MINI_BATCHES, replicas=(2, 1))
    state = train_pipeline(open_round_robin(crew, (2, 1), "stash", SGD[0]), MINI_BATCHES)
    assert distance(state, wrong.last) > 1e-3


def test_an_incomplete_round(crew: Crew) -> None:
    """At a flush, the mean is over the mini-batches of the incomplete round."""
    rules = delays("stash", (2, 1), noam((2, 1)))
    for count in (1, 2, 5):
        wanted = delayed.train(2, ADAM[1], *rules, count, replicas=(2, 1))
        state = train_pipeline(open_round_robin(crew, (2, 1), "stash", ADAM[0]), count)
        assert distance(state, wanted.last) < 1e-5


@pytest.mark.parametrize("transport", ["shared-memory", "distributed"])
def test_every_transport_gives_the_same(crew: Crew, crews: Crews, transport: str) -> None:
    wanted = train_pipeline(open_round_robin(crew, (2, 1), "stash", SGD[0]), 10)
    state = train_pipeline(open_round_robin(crews(ALIKE, transport), (2, 1), "stash", SGD[0]), 10)
    for name, value in wanted.items():
        assert torch.equal(state[name], value)


def test_resumed_and_evaluated(crew: Crew, tmp_path: Any) -> None:
    """Saving and evaluating flush in the middle of a round, which makes an update of its part."""
    with open_round_robin(crew, (2, 1), "stash", ADAM[0]) as pipe:
        list(pipe.run(batch(b) for b in range(3)))
        pipe.save(tmp_path)
        list(pipe.run(batch(b) for b in range(3, 8)))
        wanted, loss = pipe.state_dict(), pipe.evaluate([batch(9)]).loss
    with open_round_robin(crew, (2, 1), "stash", ADAM[0], checkpoint=tmp_path) as pipe:
        list(pipe.run(batch(b) for b in range(3, 8)))
        assert pipe.evaluate([batch(9)]).loss == loss
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, wanted[name])


def test_clipped_by_stage(crew: Crew) -> None:
    """A bound above all norms changes nothing, and a bound below all norms changes much."""
    found = [
        train_pipeline(open_round_robin(crew, (2, 1), "stash", SGD[0], **options), 12)
        for options in ({}, {"clip_norm": 1e6, "clip_each": True})
    ]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    with open_round_robin(crew, (2, 1), "stash", SGD[0], clip_norm=1e-3, clip_each=True) as pipe:
        before = pipe.state_dict()
        list(pipe.run([batch(0), batch(1)]))
        moved = [(value - before[name]).norm() for name, value in pipe.state_dict().items()]
    rounds, lr = (1, 2), 0.03  # updates of each stage; the second of two has momentum 0.9
    most = [lr * 1e-3 * (1 if count == 1 else 1 + 1.9) for count in rounds]
    for own, bound in zip((moved[:4], moved[4:]), most, strict=True):
        assert float(torch.stack(own).norm()) <= bound * 1.001


def test_several_micro_batches_are_refused(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match="each must have 1 micro-batch"):
        open_round_robin(crew, (2, 1), "stash", SGD[0], microbatches=2)


def test_spectrain_is_refused(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"not for \[2, 1\] replicas"):
        open_round_robin(crew, (2, 1), "spectrain", SGD[0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_pipeline_has_the_requested_replicas(crew: Crew, schedule: str) -> None:
    with hp.Pipeline(
        *task(), cluster=crew.cluster, crew=crew, captured=capture(),
        optimizer=SGD[0], schedule=schedule, cuts=[2], replicas=[2, 1],
        microbatches=None if schedule == "pipedream" else 1,
    ) as pipe:  # fmt: skip
        assert pipe.plan.replicas == (2, 1)
        assert pipe.plan.step_s > 0
        losses = [result.loss for result in pipe.run(batch(b % 4) for b in range(40))]
        assert pipe.predicted.workers == ("m0", "m1", "m2") or schedule == "1f1b"
    assert losses[-1] < losses[0]


def test_impossible_replicas_are_refused(crew: Crew) -> None:
    def make(cuts: Sequence[int], replicas: Sequence[int]) -> None:
        hp.Pipeline(
            *task(), cluster=crew.cluster, crew=crew, captured=capture(),
            optimizer=SGD[0], cuts=cuts, replicas=replicas,
        )  # fmt: skip

    with pytest.raises(HetpipeError, match=r"\[3, 2\] need 5 devices, the cluster has 4"):
        make([2], [3, 2])
    with pytest.raises(HetpipeError, match=r"of 3 stages, and cuts \[2\] make 2"):
        make([2], [1, 1, 1])
