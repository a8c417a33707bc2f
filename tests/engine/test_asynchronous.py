"""Asynchronous training equals a sequential reference with explicit old versions."""

from __future__ import annotations

from typing import Any

import delayed
import pytest
import torch
from crews import ALIKE, TRANSPORTS, Crews
from delayed import (
    ADAM,
    ADAMW,
    MINI_BATCHES,
    SGD,
    Choice,
    batch,
    distance,
    task,
    train_pipeline,
)
from pipelines import pipeline

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError


def noam(stages: int) -> list[int]:
    return [stages - n for n in range(stages)]


def hiding(stages: int) -> list[int]:
    return [2 * (stages - n) - 1 for n in range(stages)]


def open_straight(
    crew: Crew, stages: int, weights: str, optimizer: Any, depths: Any = None, microbatches: int = 1
) -> hp.Pipeline:
    """Put one stage on each of the first `stages` members."""
    return pipeline(
        crew, *task(), "0123"[:stages], "pipedream", microbatches, in_flight=depths,
        weights=weights, optimizer=optimizer,
    )  # fmt: skip


def delays(policy: str, stages: int, depths: list[int]) -> tuple[Choice, Choice]:
    """Return the papers' formulas for straight pipelines: forward and backward."""

    def seen(n: int, b: int) -> int:
        return max(0, b - depths[n] + 1)

    rules: dict[str, tuple[Choice, Choice]] = {
        "stash": (lambda n, b: (seen(n, b), 0),) * 2,
        "vertical-sync": (lambda n, b: (seen(0, b), 0),) * 2,
        "2bw": (lambda n, b: (max(0, b - 1), 0),) * 2,
        "pipeoptim": (lambda n, b: (seen(n, b), depths[n] - 1), lambda n, b: (b, 0)),
        "spectrain": (
            lambda n, b: (seen(n, b), n // 2 + stages - n - 1),
            lambda n, b: (b, n // 2),
        ),
    }
    return rules[policy]


CASES = [
    (policy, depth, pair)
    for policy, depth in [
        ("stash", noam), ("stash", hiding), ("vertical-sync", noam), ("vertical-sync", hiding),
        ("pipeoptim", noam), ("pipeoptim", hiding), ("spectrain", noam),
    ]
    for pair in (SGD, ADAM, ADAMW)
    if policy != "spectrain" or pair is SGD
]  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("policy", "depth", "pair"),
    CASES,
    ids=[f"{policy}-{depth.__name__}-{pair[0].name}" for policy, depth, pair in CASES],
)
def test_equals_the_sequential_reference(
    crew: Crew, stages: int, policy: str, depth: Any, pair: Any
) -> None:
    optimizer, plain = pair
    depths = depth(stages)
    wanted = delayed.train(stages, plain, *delays(policy, stages, depths), MINI_BATCHES)
    state = train_pipeline(open_straight(crew, stages, policy, optimizer, depths))
    assert distance(state, wanted.last) < 1e-5


class ByDimensions:
    """An optimizer for weights, and another one for biases."""

    def __init__(self, weights: Any, biases: Any) -> None:
        self._by_dimensions = {2: weights, 1: biases}

    def __getattr__(self, method: str) -> Any:
        return lambda w, *values: getattr(self._by_dimensions[w.ndim], method)(w, *values)


def grouped(kind: Any, first: dict[str, Any], second: dict[str, Any]) -> hp.optim.Optimizer:
    """Return torch's optimizer with the settings `first` for weights and `second` for biases."""
    named = dict(task()[0].named_parameters())
    groups = [[p for p in named.values() if p.ndim == dimensions] for dimensions in (2, 1)]
    theirs = kind([{"params": groups[0], **first}, {"params": groups[1], **second}])
    return hp.optim.from_torch(theirs).named(named)


GROUPS: dict[str, tuple[hp.optim.Optimizer, Any]] = {
    "spectrain": (
        grouped(torch.optim.SGD, {"lr": 0.03, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.5}),
        ByDimensions(delayed.Momentum(0.03), delayed.Momentum(0.05, 0.5)),
    ),
    "pipeoptim": (
        grouped(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {"weight_decay": 0.0}),
        ByDimensions(delayed.Adam(0.01, 0.1), delayed.Adam(0.001)),
    ),
}


@pytest.mark.parametrize("policy", GROUPS)
def test_groups_predict_with_their_own_settings(crew: Crew, policy: str) -> None:
    optimizer, plain = GROUPS[policy]
    wanted = delayed.train(3, plain, *delays(policy, 3, noam(3)), MINI_BATCHES)
    state = train_pipeline(open_straight(crew, 3, policy, optimizer, noam(3)))
    assert distance(state, wanted.last) < 1e-5


@pytest.mark.wide
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("pair", [SGD, ADAM], ids=["sgd", "adam"])
def test_two_buffered_weights(crew: Crew, stages: int, pair: Any) -> None:
    optimizer, plain = pair
    rule = delays("2bw", stages, noam(stages))
    wanted = delayed.train(stages, plain, *rule, MINI_BATCHES, microbatches=4)
    state = train_pipeline(open_straight(crew, stages, "2bw", optimizer, noam(stages), 4))
    assert distance(state, wanted.last) < 1e-5


@pytest.mark.parametrize("policy", ["stash", "vertical-sync", "pipeoptim", "spectrain"])
def test_a_wrong_delay_is_detected(crew: Crew, policy: str) -> None:
    """The distance to a reference with a delay that is wrong by one update is over the limit."""
    forward, backward = delays(policy, 3, noam(3))

    def late(n: int, b: int) -> tuple[int, float]:
        t, ahead = forward(n, b)
        return max(0, t - 1), ahead

    wrong = delayed.train(3, SGD[1], late, backward, MINI_BATCHES)
    state = train_pipeline(open_straight(crew, 3, policy, SGD[0], noam(3)))
    assert distance(state, wrong.last) > 1e-3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_gives_the_same(crew: Crew, crews: Crews, transport: str) -> None:
    wanted = train_pipeline(open_straight(crew, 3, "pipeoptim", SGD[0], hiding(3)))
    state = train_pipeline(
        open_straight(crews(ALIKE, transport), 3, "pipeoptim", SGD[0], hiding(3))
    )
    for name, value in wanted.items():
        assert torch.equal(state[name], value)


@pytest.mark.parametrize(
    ("policy", "most", "microbatches"),
    [
        ("stash", [4, 3, 2, 1], 1),
        ("vertical-sync", [4, 4, 4, 4], 1),
        ("2bw", [2, 2, 2, 2], 4),
        ("spectrain", [2, 2, 2, 2], 1),
        ("pipeoptim", [2, 2, 2, 1], 1),
    ],
)
def test_live_versions(crew: Crew, policy: str, most: list[int], microbatches: int) -> None:
    """The counts equal the papers' at NOAM.

    Predicting policies hold one version and at most one predicted copy.
    """
    with open_straight(crew, 4, policy, SGD[0], noam(4), microbatches) as pipe:
        results = list(pipe.run(batch(b) for b in range(12)))
    seen = [max(column) for column in zip(*(r.live_versions for r in results), strict=True)]
    assert seen == most


def test_results_name_their_weight_versions(crew: Crew) -> None:
    with open_straight(crew, 3, "stash", SGD[0], noam(3)) as pipe:
        first = [result.versions for result in pipe.run(batch(b) for b in range(5))]
        assert first == [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4)]
        more = [result.versions for result in pipe.run(batch(b) for b in range(5, 7))]
        assert more == [(3, 4, 5), (4, 5, 6)]  # a second run continues where the first ended
        pipe.flush()
        assert [result.versions for result in pipe.run([batch(7)])] == [(7, 7, 7)]
    with open_straight(crew, 3, "vertical-sync", SGD[0], noam(3)) as pipe:
        synced = [result.versions for result in pipe.run(batch(b) for b in range(5))]
        assert synced == [(0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1, 1), (2, 2, 2)]


def test_step_flushes_and_so_equals_plain_training(crew: Crew) -> None:
    wanted = delayed.train(3, SGD[1], lambda n, b: (b, 0), lambda n, b: (b, 0), 10)
    with open_straight(crew, 3, "stash", SGD[0]) as pipe:
        for b in range(10):
            pipe.step(*batch(b))
        state = pipe.state_dict()
    assert distance(state, wanted.last) < 1e-5


def test_prediction_is_nearer_to_the_weights_of_the_backward() -> None:
    """At the first of four stages, the prediction is nearer in 90 % of the steps from 10 on."""
    for _, plain in (SGD, ADAM, ADAMW):
        rules = delays("pipeoptim", 4, noam(4))
        nearer = 0
        history, states = delayed.train(4, plain, *rules, 60)
        for b in range(10, 60):
            seen = b - 3
            weight, used = history[0][seen].weight, history[0][b].weight
            predicted = plain.predict(weight, states[0][seen][0], seen, 3)
            nearer += bool((predicted - used).norm() < (weight - used).norm())
        assert nearer >= 45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "flush"}, "pipedream is asynchronous and weights='flush' does not fit"),
        ({"weights": "stale"}, "no weight policy 'stale'; known: flush, stash"),
        ({"weights": "2bw", "microbatches": 1}, "1 in a mini-batch and 3 in flight; use 3"),
        ({"weights": "spectrain", "optimizer": ADAM[0]}, "momentum of sgd alone, not of adam"),
        ({"weights": "spectrain", "depths": [5, 3, 1]}, r"with \[3, 2, 1\] in flight, not for"),
        ({"weights": "pipeoptim", "optimizer": hp.optim.sgd(lr=0.1)}, "sgd needs momentum"),
        (
            {
                "weights": "spectrain",
                "optimizer": grouped(torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
            },
            "spectrain predicts with the momentum of sgd alone",
        ),
    ],
    ids=[
        "flush",
        "stale",
        "2bw",
        "spectrain_adam",
        "spectrain_deep",
        "pipeoptim_plain_sgd",
        "spectrain_plain_group",
    ],
)
def test_invalid_options_are_refused(crew: Crew, options: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        open_straight(crew, 3, **{"optimizer": SGD[0], **options})
