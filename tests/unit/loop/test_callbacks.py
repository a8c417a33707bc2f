"""The callbacks of `Pipeline.fit`, with states and results that no pipeline made."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hetpipe.callbacks import (
    CSV,
    Callback,
    Epoch,
    History,
    MLflow,
    Progress,
    State,
    TensorBoard,
    WandB,
)
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.results import Result

NAMES = ("loss", "eval_loss", "accuracy")


def epoch(number: int, accuracy: float = 0.5) -> Epoch:
    return Epoch(number, 1.5 / number, 8, 2, 2 * number, 0.25, 2.0, {"accuracy": accuracy})


def state(*epochs: Epoch, resumed: bool = False) -> State:
    pipe: Any = None
    return State(pipe, 3, NAMES, History(epochs), update=2 * len(epochs), resumed=resumed)


def feed(callback: Callback, error: BaseException | None = None) -> State:
    """Call a callback as a fit of one epoch with two mini-batches does."""
    now = state()
    callback.begin(now)
    for index, loss in enumerate((2.0, 1.0)):
        now.epoch, now.batch = 1, index + 1
        callback.step(now, Result(index, loss, (0,), samples=4, update=index + 1, rates=(0.1,)))
    now.history.epochs.append(epoch(1))
    callback.epoch(now, now.history.epochs[-1])
    now.error = error
    callback.end(now)
    return now


LOGGED = [
    (1, {"loss": 2.0, "lr": 0.1}),
    (2, {"loss": 1.0, "lr": 0.1}),
    (2, {"epoch/loss": 1.5, "epoch/eval_loss": 2.0, "epoch/accuracy": 0.5}),
]


def test_a_table_has_the_rows_before_a_resume(tmp_path: Path) -> None:
    table, now = CSV(tmp_path / "new" / "log.csv"), state(epoch(1), resumed=True)
    table.begin(now)
    now.history.epochs.append(epoch(2, math.nan))
    table.epoch(now, now.history.epochs[-1])
    assert table.path.read_text() == (
        "epoch,samples,updates,update,took_s,loss,eval_loss,accuracy\n"
        "1,8,2,2,0.25,1.5,2.0,0.5\n2,8,2,4,0.25,0.75,2.0,nan\n"
    )
    with pytest.raises(HetpipeError, match="cannot write"):
        CSV("/dev/null/log.csv").begin(now)


def test_a_table_has_all_values_of_all_epochs(tmp_path: Path) -> None:
    table, now = CSV(tmp_path / "log.csv"), state(epoch(1))
    now.history.epochs.append(replace(epoch(2), metrics={"f1": 0.5, "recall": 1.0}))
    table.epoch(now, now.history.epochs[-1])
    assert table.path.read_text() == (
        "epoch,samples,updates,update,took_s,loss,eval_loss,accuracy,f1,recall\n"
        "1,8,2,2,0.25,1.5,2.0,0.5,,\n2,8,2,4,0.25,0.75,2.0,,0.5,1.0\n"
    )


def test_the_best_epoch() -> None:
    history = History(map(epoch, (1, 2, 3, 4), (math.nan, 0.25, 0.75, 0.75)))
    assert [history.best(*at) for at in (("loss",), ("accuracy",), ("accuracy", "min"))] == [
        history.epochs[3], history.epochs[2], history.epochs[1]
    ]  # fmt: skip
    assert history.best("f1") is None
    assert History().best("loss") is None


class FakeWriter:
    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.arguments = folder, purge_step
        self.scalars: dict[tuple[str, int], float] = {}
        self.closed = False
        writers.append(self)

    def add_scalar(self, name: str, value: float, update: int) -> None:
        self.scalars[name, update] = value

    def close(self) -> None:
        self.closed = True


writers: list[FakeWriter] = []


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    feed(TensorBoard("runs"))
    wanted = {(name, update): each[name] for update, each in LOGGED for name in each}
    assert writers[-1].scalars == wanted
    assert writers[-1].closed
    assert writers[-1].arguments == ("runs", None)
    TensorBoard("runs").begin(state(epoch(1), resumed=True))
    assert writers[-1].arguments == ("runs", 3)
    feed(TensorBoard("runs", every=2))
    assert sorted(update for name, update in writers[-1].scalars if name == "loss") == [1]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ValueError(), 1)])
def test_weights_and_biases(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)),
        finish=lambda exit_code: calls.append(exit_code),
    )
    module: Any = ModuleType("wandb")
    module.init, module.run = lambda **options: calls.append(options) or run, None
    monkeypatch.setitem(sys.modules, "wandb", module)
    feed(WandB(), error)
    assert calls == [{}, *LOGGED, code]
    module.run = run
    calls.clear()
    feed(WandB(), error)
    assert calls == LOGGED  # the user's run stays open
    calls.clear()
    feed(WandB(project="mine"), error)
    assert calls == [{"project": "mine"}, *LOGGED, code]


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED")],
)
def test_mlflow(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: str) -> None:
    calls: list[Any] = []
    module: Any = ModuleType("mlflow")
    module.start_run = lambda **options: calls.append(options)
    module.log_metrics = lambda values, step: calls.append((step, values))
    module.end_run, module.active_run = calls.append, lambda: None
    monkeypatch.setitem(sys.modules, "mlflow", module)
    feed(MLflow(), error)
    assert calls == [{}, *LOGGED, status]
    module.active_run = object
    calls.clear()
    feed(MLflow(), error)
    assert calls == LOGGED  # the user's run stays open
    calls.clear()
    feed(MLflow(run_name="mine", nested=True), error)
    assert calls == [{"run_name": "mine", "nested": True}, *LOGGED, status]


@pytest.mark.parametrize(
    ("callback", "package"),
    [(TensorBoard("runs"), "tensorboard"), (WandB(), "wandb"), (MLflow(), "mlflow")],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, callback: Callback, package: str
) -> None:
    for name in (package, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HetpipeError, match=f"needs the package {package}: pip install {package}"):
        callback.begin(state())


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    feed(Progress())
    out, err = capsys.readouterr()
    assert (out, err) == ("", "epoch 1 of 3: loss 1.5, eval_loss 2, accuracy 0.5 (0.2 s)\n")


def test_progress_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    feed(Progress())
    out, err = capsys.readouterr()
    assert out == ""
    assert "epoch 1 of 3, loss 2" in err
    assert "epoch 1 of 3: loss 1.5, eval_loss 2, accuracy 0.5" in err


def test_the_base_class_does_nothing() -> None:
    feed(Callback())
