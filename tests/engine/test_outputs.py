"""Outputs of a model, losses and metrics in eval mode equal torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from models import MLP, Normalized, batches
from pipelines import in_one_place, pipeline
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError


def accuracy(output: torch.Tensor, y: torch.Tensor) -> float:
    return float((output.argmax(1) == y).float().mean())


class Both(NamedTuple):
    logits: torch.Tensor
    extra: dict[str, Any]


class Branches(nn.Module):
    """A model whose output has a structure, and tensors that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)
        self.other = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Both:
        hidden = self.body(x)
        logits = self.head(hidden)
        extra = {"hidden": hidden, "other": self.other(hidden).softmax(1), "none": None, "n": 3}
        return Both(logits, {**extra, "top": logits.argmax(1)})


def branches_loss(output: Both, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, y)


@pytest.fixture
def pipe(crew: Crew) -> Iterator[hp.Pipeline]:
    torch.manual_seed(0)
    with pipeline(
        crew, MLP(), F.cross_entropy, batches(1)[0], "01", "1f1b", 2, optimizer=hp.optim.sgd(lr=0.1)
    ) as opened:
        yield opened


def trained_model(pipe: hp.Pipeline) -> MLP:
    model = MLP()
    model.load_state_dict(pipe.state_dict())
    return model.eval()


def test_predictions_equal_torch(pipe: hp.Pipeline) -> None:
    data = batches(4)
    for x, y in data:
        pipe.step(x, y)
    model = trained_model(pipe)
    assert torch.allclose(pipe.predict(data[0][0]), model(data[0][0]), atol=1e-6)
    found = list(pipe.predict_batches(x for x, _ in data))
    assert len(found) == len(data)
    for output, (x, _) in zip(found, data, strict=True):
        assert output.dtype is torch.float32
        assert torch.allclose(output, model(x), atol=1e-6)
    pipe.step(*data[0])  # the training goes on


def test_other_numbers_of_samples(pipe: hp.Pipeline) -> None:
    x, _ = batches(1)[0]
    model = trained_model(pipe)
    sizes = (len(x), 1, 3, len(x), 2)
    found = pipe.predict_batches(x[:size] for size in sizes)
    for output, size in zip(found, sizes, strict=True):
        assert torch.allclose(output, model(x[:size]), atol=1e-6)


def test_calls_between_two_predictions(pipe: hp.Pipeline) -> None:
    data = batches(6)
    model = trained_model(pipe)
    found = pipe.predict_batches(x for x, _ in data)
    first = [next(found), next(found)]
    mean = pipe.evaluate([data[0]])
    first.append(next(found))
    again = pipe.predict(data[5][0])
    rest = [*first, *found]
    assert len(rest) == 6
    for output, (x, _) in zip(rest, data, strict=True):
        assert torch.allclose(output, model(x), atol=1e-6)
    assert torch.allclose(again, rest[5], atol=1e-6)
    assert mean.loss == pytest.approx(F.cross_entropy(model(data[0][0]), data[0][1]).item())
    found = pipe.predict_batches(x for x, _ in data)
    next(found)
    pipe.step(*data[0])
    del found


def test_loss_and_metrics_over_a_dataset(pipe: hp.Pipeline) -> None:
    data = batches(3)
    data.append((data[0][0][:3], data[0][1][:3]))
    model = trained_model(pipe)
    xs, ys = (torch.cat([batch[n] for batch in data]) for n in range(2))
    outputs = model(xs)

    class Count:
        right = 0

        def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
            self.right += int((output.argmax(1) == y).sum())

        def compute(self) -> int:
            return self.right

    found = pipe.evaluate(iter(data), metrics={"accuracy": accuracy, "right": Count()})
    assert found.loss == pytest.approx(F.cross_entropy(outputs, ys).item(), rel=1e-5)
    assert found.samples == len(ys)
    assert found.metrics["accuracy"] == pytest.approx(accuracy(outputs, ys))
    assert found.metrics["right"] == int((outputs.argmax(1) == ys).sum())
    assert pipe.evaluate(data).metrics == {}
    whole = pipe.evaluate(data[:-1], metrics={"accuracy": accuracy})
    assert pipe.evaluate(in_one_place(data[:-1]), metrics={"accuracy": accuracy}) == whole
    with pytest.raises(HetpipeError, match="at least one mini-batch"):
        pipe.evaluate([])
    with pytest.raises(HetpipeError, match=r"metric 'a' is 3: give a function"):
        pipe.evaluate(data, metrics={"a": 3})  # type: ignore[dict-item]
    with pytest.raises(HetpipeError, match=r"metric 'a' is a Tensor of shape \(.*: return one num"):
        pipe.evaluate(data, metrics={"a": lambda output, y: output})


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)], ids=str)
def test_a_structure_and_tensors_beside_the_loss(crew: Crew, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    model = Branches()
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    members = "012"[: len(cuts) + 1]
    with pipeline(
        crew, model, branches_loss, (x, y), members, "gpipe", 2, cuts=cuts,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        found = pipe.predict(x)
        metrics = pipe.evaluate([(x, y)], {"a": lambda out, y: accuracy(out.logits, y)}).metrics
    wanted = model.eval()(x)
    assert isinstance(found, Both)
    assert torch.allclose(found.logits, wanted.logits, atol=1e-6)
    assert list(found.extra) == list(wanted.extra)
    for name in ("hidden", "other", "top"):
        assert torch.allclose(found.extra[name], wanted.extra[name], atol=1e-6)
    assert found.extra["none"] is None
    assert found.extra["n"] == 3
    assert metrics["a"] == pytest.approx(accuracy(wanted.logits, y))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "gpipe", "data-parallel"])
def test_replicas_and_schedules(crews: Crews, schedule: str) -> None:
    crew = crews(("numpy:cpu:0", "pytorch:cpu:0", "numpy:cpu:0"), "shared-memory")
    torch.manual_seed(0)
    data = batches(3)
    places: Any = [("m0", "m1"), ("m2",)] if schedule != "data-parallel" else [("m0", "m1")] * 2
    counts = [len(place) for place in places]
    with pipeline(
        crew, MLP(), F.cross_entropy, data[0], places, schedule, 1 + (schedule != "pipedream"),
        cuts=(2,),
        shares=[(2.0, 1.0)[:count] if schedule != "pipedream" else (1.0,) * count
                for count in counts],
        in_flight=[2, 1] if schedule == "pipedream" else [2, 2],
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        for _ in pipe.run(data):
            pass
        model = trained_model(pipe)
        for output, (x, _) in zip(pipe.predict_batches(x for x, _ in data), data, strict=True):
            assert torch.allclose(output, model(x), atol=1e-5)
        xs, ys = (torch.cat([batch[n] for batch in data]) for n in range(2))
        found = pipe.evaluate(data, {"accuracy": accuracy})
        assert found.loss == pytest.approx(F.cross_entropy(model(xs), ys).item(), rel=1e-5)
        assert found.metrics["accuracy"] == pytest.approx(accuracy(model(xs), ys))


def test_a_norm_predicts_with_its_running_statistics(crew: Crew) -> None:
    torch.manual_seed(0)
    model = Normalized()
    x, y = batches(1)[0]
    with pipeline(
        crew, model, F.cross_entropy, (x, y), "01", "1f1b", 2, optimizer=hp.optim.sgd(lr=0.1)
    ) as pipe:
        pipe.step(x, y)
        trained = Normalized()
        trained.load_state_dict(pipe.state_dict())
        assert torch.allclose(pipe.predict(x), trained.eval()(x), atol=1e-5)


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.fc(x)
        return logits, logits.square().mean()


def test_an_output_without_samples_is_refused(crew: Crew) -> None:
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    with pipeline(
        crew, Total(), lambda out, y: F.cross_entropy(out[0], y), (x, y), "0", "gpipe", 2,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        with pytest.raises(HetpipeError, match=r"tensor 1 of the model's output is .*\[\]"):
            pipe.predict(x)
        assert pipe.evaluate([(x, y)]).samples == 4
        with pytest.raises(HetpipeError, match="the batch holds"):
            pipe.predict((x, y))


def test_weights_return_into_a_model(pipe: hp.Pipeline) -> None:
    x, y = batches(1)[0]
    pipe.step(x, y)
    model = MLP().eval()
    pipe.copy_to(model)
    assert torch.equal(model(x), trained_model(pipe)(x))
    with pytest.raises(HetpipeError, match=r"Total does not take the trained state: .*Missing key"):
        pipe.copy_to(Total())


def test_a_batch_in_place_of_batches(pipe: hp.Pipeline) -> None:
    with pytest.raises(HetpipeError, match=r"metrics are Tensor.*evaluate\(\[\(x, y\)\]\)"):
        pipe.evaluate(*batches(1)[0])  # type: ignore[arg-type]


def test_results_tell_update_rate_norm_samples_and_seconds(crew: Crew) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches(4)
    with pipeline(
        crew, model, F.cross_entropy, data[0], "01", "1f1b", 2, clip_norm=0.1, accumulate=2,
        optimizer=hp.optim.sgd(lr=lambda update: 0.1 / update),
    ) as pipe:  # fmt: skip
        found = list(pipe.run(data))
    assert [result.update for result in found] == [1, 1, 2, 2]
    assert [result.rates for result in found] == [(0.1,), (0.1,), (0.05,), (0.05,)]
    assert [result.samples for result in found] == [len(x) for x, _ in data]
    assert all(result.took_s > 0 for result in found)
    torch.manual_seed(0)
    theirs = MLP()
    norms: list[float | None] = []
    for number, (x, y) in enumerate(data):
        (F.cross_entropy(theirs(x), y) / 2).backward()
        norms.append(None)
        if number % 2:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            norms[-1] = pytest.approx(norm.item(), rel=1e-4)
            torch.optim.SGD(theirs.parameters(), 0.2 / (number + 1)).step()
            theirs.zero_grad()
    assert [result.gradient_norm for result in found] == norms


def test_results_of_a_stream(crew: Crew) -> None:
    data = batches(5)
    with pipeline(
        crew, MLP(), F.cross_entropy, data[0], "01", "pipedream", 2, optimizer=hp.optim.sgd(lr=0.1)
    ) as pipe:
        found = list(pipe.run(data))
    assert [result.update for result in found] == [1, 2, 3, 4, 5]
    assert {result.rates for result in found} == {(0.1,)}
    assert {result.gradient_norm for result in found} == {None}
    assert all(result.took_s > 0 and result.samples == len(data[0][0]) for result in found)
