"""Replicas of a model, also on unequal devices and shares, equal unpartitioned training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from crews import UNLIKE, Crews
from models import CASES, MLP, Normalized, batches
from pipelines import pipeline
from reference import Parameters, check_close, gradients_of, train

import hetpipe as hp
from hetpipe.capture.program import BUFFER
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.crew.copies import Copies
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.copied import copy_values
from hetpipe.wire.shares import divide

DEVICES = UNLIKE[:3]
ADAMW = hp.optim.adamw(lr=1e-2)


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def open_divided(
    crew: Crew, model: Any, loss_fn: Any, example: Any, microbatches: int,
    shares: tuple[float, ...], cuts: tuple[int, ...] = (), **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Put all stages on each of the first members, which divide micro-batches by `shares`."""
    stages = len(cuts) + 1
    return pipeline(
        crew, model, loss_fn, example, [tuple(crew.infos)[: len(shares)]] * stages,
        "data-parallel" if cuts else "gpipe", microbatches, shares=[shares] * stages, cuts=cuts,
        in_flight=[microbatches] * stages, optimizer=ADAMW, **options,
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("case", ["mlp", "tied_autoencoder"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("shares", "cuts"), [((1, 1), ()), ((2, 1), ()), ((3, 2, 1), ()), ((2, 1), (1, 3))], ids=str
)
def test_equals_unpartitioned_training(
    crew: Crew, shares: tuple[float, ...], cuts: tuple[int, ...], microbatches: int, case: str
) -> None:
    torch.manual_seed(0)
    model, loss_fn, data = MLP(), F.cross_entropy, batches(3)
    if case != "mlp":
        found = CASES[case]
        generator = torch.Generator().manual_seed(1)
        model, loss_fn = found.model(), found.loss_fn
        data = [found.batch(generator) for _ in range(3)]
    expected = train(model, loss_fn, data, microbatches, adamw)
    with open_divided(crew, model, loss_fn, data[0], microbatches, shares, cuts) as pipe:
        found_losses = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        assert pipe.timeline.workers == tuple(f"m{n}" for n in range(len(shares)))
        sums = {f"{n}A" for n in range(len(cuts) + 1)}
        assert sums <= {str(span.action) for span in pipe.timeline.spans}
    assert found_losses == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)


def sum_and_count(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weighted sum and the sum of its weights, which differ between rows."""
    weight = (y + 1).float()
    return (F.cross_entropy(out, y, reduction="none") * weight).sum(), weight.sum()


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(), (2,)], ids=str)
def test_a_counted_loss_and_clipping(crew: Crew, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches(3)
    expected = train(
        model, sum_and_count, data, 1, adamw,
        before_step=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.2),
    )  # fmt: skip
    with open_divided(crew, model, sum_and_count, data[0], 2, (2, 1), cuts, clip_norm=0.2) as pipe:
        assert [pipe.step(x, y) for x, y in data] == pytest.approx(expected.losses, rel=1e-5)
        state = pipe.state_dict()
    check_close(state, expected.state)


@pytest.mark.slow
def test_a_sum_continues_while_earlier_stages_compute() -> None:
    """A message on the emulated link takes as long as thousands of these passes."""
    members = (Member("m0", "numpy:cpu:0"), Member("m1", "numpy:cpu:0"))
    slow = {frozenset(("m0", "m1")): Link(0.3, None)}
    data = batches(2)
    with (
        Crew.start(Cluster(members, slow)) as crew,
        open_divided(crew, MLP(), F.cross_entropy, data[0], 2, (1, 1), (2,)) as pipe,
    ):
        for x, y in data:
            pipe.step(x, y)
        spans = sorted(pipe.timeline.spans, key=lambda span: span.end_s - span.start_s)
        at = {(span.worker, str(span.action)): span for span in spans}  # sums, not messages
    for worker in range(2):
        behind, pass_ = at[worker, "1A"], at[worker, "0B1"]
        assert pass_.end_s < behind.end_s <= at[worker, "0U"].start_s


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "distributed"])
def test_every_transport_gives_the_same(crew: Crew, crews: Crews, transport: str) -> None:
    def trained(crew: Crew) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        data = batches(3)
        with open_divided(crew, MLP(), F.cross_entropy, data[0], 2, (2, 1, 1), (1, 3)) as pipe:
            for x, y in data:
                pipe.step(x, y)
            return pipe.state_dict()

    wanted = trained(crew)
    found = trained(crews(DEVICES, transport))
    for name, value in wanted.items():
        assert torch.equal(found[name], value)


@pytest.mark.slow
def test_batch_norm_is_local_and_dropout_is_not(crew: Crew) -> None:
    """Statistics use only a replica's rows; dropout masks depend only on the sample."""
    torch.manual_seed(0)
    model, data = Normalized(), batches(2)
    norm = model.first[1]
    with open_divided(crew, model, F.cross_entropy, data[0], 1, (1, 1)) as pipe:
        pipe.step(*data[0])
        mean = pipe.state_dict()["first.1.running_mean"]
    first = model.first[0](data[0][0][:6]).mean(0) * norm.momentum
    torch.testing.assert_close(mean, first.detach(), rtol=1e-5, atol=1e-6)
    plain = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(20, 5))
    found = []
    for shares in [(1,), (1, 1), (2, 1)]:
        with open_divided(crew, plain, F.cross_entropy, data[0], 1, shares) as pipe:
            found.append(pipe.step(*data[1]))
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)


def test_gradients_leave_the_buffers_of_each_replica(crew: Crew) -> None:
    data = batches(2)
    with open_divided(crew, Normalized(), F.cross_entropy, data[0], 1, (1, 1)) as pipe:
        pipe.step(*data[0])
        before = crew.buffers()
        pipe.gradients(*data[1])
        after = crew.buffers()
    name = "first.1.running_mean"
    assert not np.array_equal(before[0][name], before[1][name])
    for values, wanted in zip(after, before, strict=True):
        assert all(np.array_equal(values[n], value) for n, value in wanted.items())


def test_a_copy_has_the_buffers_of_the_first_replica(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `read` does, also if another replica is nearer."""
    data = batches(1)
    with open_divided(crew, Normalized(), F.cross_entropy, data[0], 1, (1, 1)) as pipe:
        pipe.step(*data[0])
        monkeypatch.setattr(crew, "_nearest", lambda members: members[-1])
        found = copy_values(pipe._training, Copies())[BUFFER]
        wanted = crew.read(BUFFER)
        assert all(np.array_equal(found[name], value) for name, value in wanted.items())


def test_accumulated_gradients_and_gradients_without_update(crew: Crew) -> None:
    """All stages sum accumulated gradients at once; `gradients` sums but does not update."""
    torch.manual_seed(0)
    model, data = MLP(), batches(4)
    expected = train(model, F.cross_entropy, data, 1, adamw, accumulate=2)
    with open_divided(
        crew, model, F.cross_entropy, data[0], 2, (2, 1), (1, 3), accumulate=2
    ) as pipe:
        _, gradients = pipe.gradients(*data[0])
        check_close(gradients, gradients_of(model, F.cross_entropy, *data[0])[1])
        for x, y in data:
            pipe.step(x, y)
        state = pipe.state_dict()
    check_close(state, expected.state)


def test_a_resumed_and_evaluated_replica(crew: Crew, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches(3)
    with open_divided(crew, model, F.cross_entropy, data[0], 2, (2, 1)) as pipe:
        pipe.step(*data[0])
        pipe.save(tmp_path)
        wanted = pipe.evaluate([data[1]]).loss
        model.load_state_dict(pipe.state_dict())
    assert wanted == pytest.approx(F.cross_entropy(model(data[1][0]), data[1][1]).item(), rel=1e-5)
    with open_divided(
        crew, MLP(), F.cross_entropy, data[0], 2, (2, 1), checkpoint=tmp_path
    ) as pipe:
        assert pipe.evaluate([data[1]]).loss == wanted


@pytest.mark.parametrize(
    ("samples", "weights", "rows"),
    [
        (8, (1, 1), (4, 4)),
        (9, (1, 1), (5, 4)),
        (32, (1.12, 1), (17, 15)),
        (6, (3, 2, 1), (3, 2, 1)),
        (4, (9, 1), (3, 1)),
        (3, (1, 7, 9), (1, 1, 1)),
    ],
)
def test_rows_are_divided_by_weight(samples: int, weights: Any, rows: Any) -> None:
    assert divide(samples, weights) == rows


def test_too_few_samples_are_refused(crew: Crew) -> None:
    with pytest.raises(
        HetpipeError, match="3 replicas cannot split a micro-batch of 2 samples: one of them would"
    ):
        divide(2, (1, 1, 1))
    with pytest.raises(HetpipeError, match="cannot split a micro-batch of 1 samples"):
        open_divided(crew, MLP(), F.cross_entropy, batches(1)[0], 12, (1, 1))
