"""One update for several mini-batches equals plain torch that steps once per such group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, MLP
from pipelines import pipeline
from reference import check_close, train

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

LR = 0.1
STAGES = ("m0", "m1")
REPLICAS = (STAGES,)  # one stage with two replicas
SGD = hp.optim.sgd(lr=LR, momentum=0.9)


def batches(case: str, rows: Sequence[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    found = [CASES[case].batch(generator) for _ in rows]
    return [(x[:count], y[:count]) for (x, y), count in zip(found, rows, strict=True)]


def sum_and_count(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (y + 1).float()
    return (F.cross_entropy(out, y, reduction="none") * weight).sum(), weight.sum()


@pytest.mark.parametrize(
    ("case", "rows", "loss_fn", "members", "schedule"),
    [
        ("mlp", [12] * 6, None, STAGES, "1f1b"),
        ("mlp", [12] * 7, None, STAGES, "1f1b"),  # the flush applies the last mini-batch alone
        ("mlp", [12, 12, 12, 12, 9, 12], None, STAGES, "1f1b"),  # a new size in mid-group
        ("mlp", [12] * 6, sum_and_count, STAGES, "1f1b"),
        ("tied_autoencoder", [12, 12, 12, 12, 8, 12], None, STAGES, "1f1b"),
        ("mlp", [12] * 6, None, REPLICAS, "1f1b"),
        ("mlp", [12, 12, 12, 12, 9], None, STAGES, "fbp"),
    ],
    ids=["even", "rest", "sizes", "counted", "tied", "replicas", "fbp"],
)
def test_equals_plain_torch(
    crew: Crew, case: str, rows: list[int], loss_fn: Any, members: Any, schedule: str
) -> None:
    torch.manual_seed(0)
    model, data = CASES[case].model(), batches(case, rows)
    loss_fn = loss_fn or CASES[case].loss_fn
    expected = train(
        model, loss_fn, data, 1, lambda p: torch.optim.SGD(p, LR, momentum=0.9), accumulate=3
    )
    with pipeline(
        crew, model, loss_fn, data[0], members, schedule, 2, accumulate=3, optimizer=SGD
    ) as pipe:
        for x, y in data:
            pipe.step(x, y)
        pipe.flush()
        state = pipe.state_dict()
    check_close(state, expected.state)


def test_evaluate_and_state_dict_apply_nothing_and_save_applies(crew: Crew, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches("mlp", [12] * 4)
    task = model, F.cross_entropy, data[0], STAGES, "1f1b", 2
    with pipeline(crew, *task, accumulate=3, optimizer=SGD) as pipe:
        pipe.step(*data[0])
        loss = pipe.evaluate([data[3]]).loss
        assert loss == pytest.approx(F.cross_entropy(model(data[3][0]), data[3][1]).item())
        pipe.step(*data[1])
        for name, value in model.state_dict().items():
            assert torch.equal(pipe.state_dict()[name], value)
        pipe.save(tmp_path)
        wanted = pipe.state_dict()
    assert not torch.equal(wanted["layers.0.weight"], model.state_dict()["layers.0.weight"])
    with pipeline(
        crew, MLP(), *task[1:], checkpoint=tmp_path, optimizer=SGD, changed=["accumulate"]
    ) as pipe:
        assert pipe.steps == 2
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, wanted[name])


def eightfold(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 8 * F.cross_entropy(out, y)


def test_a_skipped_update_drops_its_accumulated_gradients(crew: Crew) -> None:
    """The first two updates overflow and are skipped;

    the others equal updates without a loss scale.
    """
    found = []
    for options in ({}, {"loss_scale": hp.LossScale(start=2.0**127)}):
        torch.manual_seed(0)
        data = batches("mlp", [12] * 8)
        with pipeline(
            crew, MLP(), eightfold, data[0], STAGES, "1f1b", 2, accumulate=2, optimizer=SGD,
            **options,
        ) as pipe:  # fmt: skip
            for x, y in data if options else data[4:]:
                pipe.step(x, y)
            found.append(pipe.state_dict())
            assert pipe.skipped == (2 if options else 0)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)


def test_the_learning_rate_follows_the_number_of_updates(crew: Crew) -> None:
    seen: list[int] = []

    def lr(step: int) -> float:
        seen.append(step)
        return 0.1

    data = batches("mlp", [12] * 6)
    with pipeline(
        crew, MLP(), F.cross_entropy, data[0], STAGES, "1f1b", 2, accumulate=3,
        optimizer=hp.optim.sgd(lr=lr),
    ) as pipe:  # fmt: skip
        for x, y in data:
            pipe.step(x, y)
    assert max(seen) == 2


def test_invalid_accumulation_is_refused(crew: Crew) -> None:
    data = batches("mlp", [12, 9])

    def make(accumulate: int, members: Any, schedule: str = "1f1b") -> hp.Pipeline:
        torch.manual_seed(0)
        return pipeline(
            crew, MLP(), F.cross_entropy, data[0], members, schedule, 2, accumulate=accumulate,
            optimizer=SGD,
        )  # fmt: skip

    with pytest.raises(HetpipeError, match="accumulate=0: give a whole number of 1 or more"):
        make(0, STAGES)
    with pytest.raises(HetpipeError, match="accumulate=2: pipedream updates after each"):
        make(2, STAGES, "pipedream")
    with make(2, REPLICAS) as pipe:
        pipe.step(*data[0])
        with pytest.raises(HetpipeError, match="1 of 2 accumulated mini-batches on replicas"):
            pipe.step(*data[1])
