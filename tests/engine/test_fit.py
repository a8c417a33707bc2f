"""`Pipeline.fit` trains as a plain loop of torch, and ends well whatever happens."""

from __future__ import annotations

import csv
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Record, accuracy, data, loader, model, open_fit
from torch import nn

import hetpipe as hp
from hetpipe.callbacks import CSV, BestCheckpoint, EarlyStopping
from hetpipe.checkpoint import load
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, NotFiniteError

DEVICES = ("numpy:cpu:0",) * 2
SYNCHRONOUS, ASYNCHRONOUS = "1f1b", "pipedream"


def torch_loop(epochs: int, lr: float) -> tuple[list[float], list[dict[str, float]], nn.Module]:
    """Train with plain torch; return the losses, the rows of epochs and the model."""
    net, loss_fn = model(), nn.functional.cross_entropy
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    losses, rows, (all_x, all_y) = [], [], data(1)
    torch.manual_seed(5)
    for _ in range(epochs):
        total = count = 0.0
        for x, y in loader():
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            total, count = total + loss.item() * len(y), count + len(y)
        with torch.no_grad():
            output = net(all_x)
        values = {"eval_loss": loss_fn(output, all_y).item(), "accuracy": accuracy(output, all_y)}
        rows.append({"loss": total / count, **{n: float(v) for n, v in values.items()}})
    return losses, rows, net


def test_a_fit_equals_a_loop_of_torch(crew: Crew) -> None:
    losses, rows, net = torch_loop(3, lr=0.3)
    record, (x, y) = Record(), data(1)
    test_set = [(x[:10], y[:10]), (x[10:], y[10:])]
    with open_fit(crew, optimizer=hp.optim.sgd(lr=0.3)) as pipe:
        torch.manual_seed(5)
        history = pipe.fit(
            loader(), 3, eval_data=test_set, metrics={"accuracy": accuracy}, callbacks=[record]
        )
        state = pipe.state_dict()
    assert record.losses == pytest.approx(losses, rel=1e-12)
    for row, wanted in zip(history.rows(), rows, strict=True):
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert [row["update"] for row in history.rows()] == [7, 14, 21]
    assert {row["updates"] for row in history.rows()} == {7}
    assert {row["samples"] for row in history.rows()} == {26}
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value)
    assert record.calls == ["begin", "epoch 1", "epoch 2", "epoch 3", "end"]


def test_an_asynchronous_fit_flushes_only_between_epochs(crew: Crew) -> None:
    with open_fit(crew, schedule=ASYNCHRONOUS) as pipe:
        torch.manual_seed(5)
        losses = []
        for _ in range(2):
            losses += [result.loss for result in pipe.run(loader())]
            pipe.flush()
        wanted = pipe.state_dict()
    record = Record()
    with open_fit(crew, schedule=ASYNCHRONOUS) as pipe:
        torch.manual_seed(5)
        pipe.fit(loader(), 2, callbacks=[record])
        state = pipe.state_dict()
    assert record.losses == losses
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS])
@pytest.mark.parametrize("split", ["y", ("y",), lambda batch: (batch["x"], batch["y"])])
def test_a_dict_is_split(crew: Crew, schedule: str, split: Any) -> None:
    """The inputs of a dict are a dict, as for the models of transformers."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def loss_fn(output: torch.Tensor, y: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y[0] if isinstance(y, tuple) else y)

    def rows(epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        seen.append(epoch)
        return ({"x": x[lo : lo + 4], "y": y[lo : lo + 4]} for lo in range(0, 24, 4))

    x, y = data()
    seen: list[int] = []
    inputs: Any = x[:4] if callable(split) else {"x": x[:4]}
    labels: Any = (y[:4],) if isinstance(split, tuple) else y[:4]
    options: dict[str, Any] = {"optimizer": hp.optim.sgd(lr=0.1), "crew": crew, "microbatches": 1}
    with hp.Pipeline(
        Named(), loss_fn, (inputs, labels), cluster=crew.cluster, schedule=schedule, cuts=[],
        **options,
    ) as pipe:  # fmt: skip
        history = pipe.fit(rows, 2, eval_data=rows, split=split)
    assert [row["samples"] for row in history.rows()] == [24, 24]
    assert seen == [1, 1, 2, 2]


def test_gradients_accumulate_within_an_epoch(crew: Crew) -> None:
    """Seven mini-batches are four updates; the last one has a single mini-batch."""
    with open_fit(crew, accumulate=2) as pipe:
        history = pipe.fit(loader(), 2)
    assert [row["updates"] for row in history.rows()] == [4, 4]


class Declining:
    """A metric that gets worse after its second evaluation."""

    def __init__(self) -> None:
        self.resets = 0
        self.samples = 0

    def reset(self) -> None:
        self.resets += 1
        self.samples = 0

    def update(self, output: Any, y: Any) -> None:
        self.samples += len(y)

    def compute(self) -> Any:
        assert self.samples == 26
        return 1.0 / (1 + abs(self.resets - 2))


@pytest.mark.parametrize(("mode", "epochs", "best"), [(None, 4, 2), ("min", 3, 1)])
def test_the_best_checkpoint_and_an_early_end(
    crew: Crew, tmp_path: Path, mode: str | None, epochs: int, best: int
) -> None:
    metrics = {"score": Declining()}
    with open_fit(crew) as pipe:
        history = pipe.fit(
            loader(), 9, eval_data=[data(1)], metrics=metrics, folder=tmp_path, monitor="score",
            mode=mode, patience=2,
        )  # fmt: skip
        with pytest.raises(HetpipeError, match=r"'scor': .* did you mean score\? "):
            pipe.fit(
                loader(), 1, eval_data=[data()], metrics=metrics,
                callbacks=[BestCheckpoint(tmp_path, "scor")],
            )  # fmt: skip
    assert len(history.epochs) == epochs
    found = history.best("score", mode)
    assert found is not None
    assert found.epoch == best
    assert load(tmp_path / "best").manifest["step"] == 7 * best
    assert load(tmp_path / "last").manifest["step"] == 7 * epochs


class Scores(Declining):
    """A metric with a dict of values."""

    def compute(self) -> Any:
        return {"score": super().compute(), "samples_seen": self.samples}


def test_values_of_a_dict_are_watched_and_written(crew: Crew, tmp_path: Path) -> None:
    table = CSV(tmp_path / "log.csv")
    with open_fit(crew) as pipe:
        history = pipe.fit(
            loader(), 9, eval_data=[data(1)], metrics={"scores": Scores()}, callbacks=[table],
            monitor="score", patience=1,
        )  # fmt: skip
        with pytest.raises(HetpipeError, match=r"'scores': no epoch has this value; .*score"):
            pipe.fit(
                loader(), 1, eval_data=[data(1)], metrics={"scores": Scores()},
                monitor="scores", patience=1,
            )  # fmt: skip
    assert len(history.epochs) == 3
    rows = list(csv.DictReader(table.path.read_text().splitlines()))
    assert [(float(row["score"]), row["samples_seen"]) for row in rows] == [
        (0.5, "26.0"), (1.0, "26.0"), (0.5, "26.0")
    ]  # fmt: skip
    assert "scores" not in rows[0]


def poisoned(epoch: int) -> list[Any]:
    """Return mini-batches; in the second epoch the third is not finite."""
    x, y = data()
    bad = x[:4] * (float("nan") if epoch == 2 else 1.0)
    return [(x[:4], y[:4]), (x[4:8], y[4:8]), (bad, y[:4]), (x[8:12], y[8:12])]


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS])
def test_a_loss_that_is_not_finite_leaves_the_checkpoint(
    crew: Crew, tmp_path: Path, schedule: str
) -> None:
    record = Record()
    with open_fit(crew, schedule=schedule) as pipe:
        with pytest.raises(NotFiniteError):
            pipe.fit(poisoned, 3, folder=tmp_path, callbacks=[record])
        assert isinstance(record.error, NotFiniteError)
        assert load(tmp_path / "last").manifest["step"] == 4
        history = pipe.fit(
            lambda epoch: poisoned(1), 2, folder=tmp_path, resume=True, callbacks=[record]
        )
    assert [row["update"] for row in history.rows()] == [4, 8]


def fail(state: Any) -> None:
    raise KeyError("of the callback")


def failing_source(epoch: int) -> Iterator[Any]:
    yield from itertools.islice(loader(1), 3)
    raise OSError("no file")


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS])
def test_an_exception_goes_through_and_the_pipeline_stays_usable(crew: Crew, schedule: str) -> None:
    with open_fit(crew, schedule=schedule) as pipe:
        first, second = Record(), Record((1, 2), fail)
        with pytest.raises(KeyError, match="of the callback") as caught:
            pipe.fit(loader(), 2, callbacks=[first, second])
        assert first.error is second.error is caught.value
        assert first.calls == ["begin", "end"]
        with pytest.raises(OSError, match="no file"):
            pipe.fit(failing_source, 1, callbacks=[first])
        assert isinstance(first.error, OSError)
        assert len(pipe.fit(loader(), 1).epochs) == 1


def test_a_begin_that_fails_ends_only_the_callbacks_before_it(crew: Crew) -> None:
    first, last = Record(), Record()
    with open_fit(crew) as pipe:
        with pytest.raises(HetpipeError, match="no epoch has this value"):
            pipe.fit(loader(), 1, callbacks=[first, EarlyStopping("accuracy", 1), last])
        assert pipe.steps == 0
    assert (first.calls, last.calls) == (["begin", "end"], [])


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS])
def test_an_interrupt_ends_a_fit_after_its_mini_batch(
    crew: Crew, tmp_path: Path, schedule: str
) -> None:
    """No result is lost, and a handler that raises nothing ends nothing."""
    record = Record((1, 3), lambda state: signal.raise_signal(signal.SIGINT))
    with open_fit(crew, schedule=schedule) as pipe:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                pipe.fit(loader(), 2, folder=tmp_path, callbacks=[record])
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert isinstance(record.error, KeyboardInterrupt)
            assert pipe.steps == len(record.losses) < 7
            assert load(tmp_path / "last").manifest["step"] == pipe.steps
            heard: list[int] = []
            signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
            assert len(pipe.fit(loader(), 1, callbacks=[record]).epochs) == 1
            assert heard == [signal.SIGINT]
        finally:
            signal.signal(signal.SIGINT, before)


def test_users_callbacks_may_use_the_pipeline(crew: Crew) -> None:
    """A callback between two results may evaluate, and read the weights."""
    found = []

    def look(state: Any) -> None:
        found.append(state.pipeline.evaluate([data()]).loss)
        found.append(state.pipeline.state_dict())
        state.stop()

    with open_fit(crew, schedule=ASYNCHRONOUS) as pipe:
        history = pipe.fit(loader(), 2, callbacks=[record := Record((2, 1), look)])
    assert len(found) == 2
    assert len(history.epochs) == 1
    assert 8 <= len(record.losses) < 14


def test_evaluations_use_the_average_of_the_weights(crew: Crew) -> None:
    with open_fit(crew, ema=0.5) as pipe:
        history = pipe.fit(loader(seed=1), 2, eval_data=[data(1)], ema=True)
        averaged, plain = (pipe.evaluate([data(1)], ema=ema).loss for ema in (True, False))
    assert history.epochs[-1].eval_loss == averaged != plain
    with open_fit(crew) as pipe, pytest.raises(HetpipeError, match="keeps no average"):
        pipe.fit(loader(), 1, eval_data=[data(1)], ema=True)
