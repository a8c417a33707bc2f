"""A pipeline refuses a loss that its micro-batches would train wrong.

It refuses at the start or, if the fault depends on the labels, at the first affected mini-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import pipeline, user_pipeline
from reference import check_close, gradients_of
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, NoMeanError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
Y = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
UNEVEN = Y.where(Y != 0, -100)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def open_pipeline(
    crew: Crew, loss_fn: Any, model: nn.Module | None = None, **options: Any
) -> hp.Pipeline:
    options = {"cuts": [1], "microbatches": 2, "schedule": "1f1b", **options}
    return user_pipeline(crew, model or network(), loss_fn, (X, Y), **options)


def weighted(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, torch.tensor([0.1, 1.0, 5.0]))


def test_refused_at_the_start(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"is 1\.01676, and the mean over .* is 0\.920989"):
        open_pipeline(crew, weighted)


def test_refused_where_replicas_divide_the_only_micro_batch(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"or microbatches=1 and one device per stage"):
        pipeline(
            crew, network(), weighted, (X, Y), [("m0", "m1")], optimizer=hp.optim.sgd(lr=0.1)
        )  # fmt: skip


def test_one_micro_batch_trains_as_torch_does(crew: Crew) -> None:
    with open_pipeline(crew, weighted, microbatches=1) as pipe:
        assert pipe.step(X, Y) == pytest.approx(1.0168, abs=1e-4)


def test_a_mini_batch_with_uneven_labels_is_refused_and_the_next_trains(crew: Crew) -> None:
    with open_pipeline(crew, F.cross_entropy) as pipe:
        first = pipe.gradients(X, Y)
        for call in (pipe.step, lambda *batch: pipe.evaluate([batch]), pipe.gradients):
            with pytest.raises(HetpipeError, match=r"2 in samples 0 to 3: cross_entropy returns"):
                call(X, UNEVEN)
        assert pipe.gradients(X, Y)[0] == first[0]
        pipe.step(X, Y)


def test_counted_sums_with_uneven_labels_train_as_torch_does(crew: Crew) -> None:
    labels = torch.cat([torch.full((4,), -100), Y[4:]])  # the first micro-batch has no label
    expected_loss, expected = gradients_of(network(), F.cross_entropy, X, labels)
    with open_pipeline(crew, sum_and_count) as pipe:
        loss, gradients = pipe.gradients(X, labels)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    check_close(gradients, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_loss_that_is_a_mean_only_in_training(crew: Crew) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            out = self.last(self.first(x))
            return out if self.training else (out,)

    def summed_in_eval(o: Any, y: Tensor) -> Tensor:
        return (
            F.cross_entropy(o[0], y, reduction="sum")
            if isinstance(o, tuple)
            else F.cross_entropy(o, y)
        )

    with open_pipeline(crew, summed_in_eval, Model()) as pipe:
        pipe.step(X, Y)
        with pytest.raises(HetpipeError, match="in eval mode the loss is no mean over samples"):
            pipe.evaluate([(X, Y)])
        pipe.step(X, Y)


def sum_and_count(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(o, y, reduction="sum"), (y != -100).sum()


NONE = torch.full_like(Y, -100)


def test_a_mini_batch_without_a_label_changes_nothing(crew: Crew) -> None:
    with open_pipeline(crew, sum_and_count) as pipe:
        expected = [pipe.step(X, Y) for _ in range(2)]
        state = pipe.state_dict()
    with open_pipeline(crew, sum_and_count) as pipe:
        losses = [pipe.step(X, Y)]
        with pytest.raises(NoMeanError, match=r"mini-batch 1 has no mean: .* Nothing of this upd"):
            pipe.step(X, NONE)
        with pytest.raises(NoMeanError, match="leave such a mini-batch out"):
            pipe.gradients(X, NONE)
        with pytest.raises(NoMeanError, match=f"the loss of {len(X)} samples has no mean"):
            pipe.evaluate([(X, NONE)])
        assert pipe.evaluate([(X, NONE), (X, Y)]).loss == pipe.evaluate([(X, Y)]).loss
        assert [*losses, pipe.step(X, Y)] == expected
        assert all(value.equal(state[name]) for name, value in pipe.state_dict().items())


def test_a_stream_continues_after_a_mini_batch_without_a_label(crew: Crew, tmp_path: Path) -> None:
    with open_pipeline(crew, sum_and_count, schedule="pipedream", weights="stash") as pipe:
        pipe.step(X, Y)
        before = pipe.state_dict()
        with pytest.raises(NoMeanError, match="mini-batch 1 has no mean"):
            pipe.step(X, NONE)
        after = pipe.state_dict()
        assert all(value.equal(before[name]) for name, value in after.items())
        pipe.step(X, Y)
        pipe.save(tmp_path)  # the weights are still valid
