"""A resumed `Pipeline.fit` gives the losses, metrics and weights of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import Record, accuracy, data, loader, model, open_fit
from torch.utils.data import DataLoader, Dataset

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError

DEVICES = ("numpy:cpu:0",) * 2
EPOCHS = 3


class Augmented(Dataset[Any]):
    """Adds noise from every default generator to the samples."""

    def __len__(self) -> int:
        return len(data()[0])

    def __getitem__(self, index: int) -> Any:
        x, y = data()
        noise = torch.randn(1).item() + random.random() + np.random.rand()
        return x[index] + noise, y[index]


def augmented() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True)


def train(
    crew: Crew, batches: Any, epochs: int, *callbacks: Any, schedule: str = "1f1b",
    accumulate: int = 1, **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Any]]:  # fmt: skip
    """Fit a new pipeline with dropout and a scheduler; return rows, without seconds, and weights.

    If an interrupt ends the fit, return nothing.
    """
    net = model(0.3)
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 4, 0.7)
    rule = hp.optim.from_torch(adam, scheduler)
    with open_fit(
        crew, net, optimizer=rule, schedule=schedule, accumulate=accumulate, seed=7
    ) as pipe:
        try:
            history = pipe.fit(
                batches, epochs, metrics={"accuracy": accuracy},
                callbacks=callbacks, **{"eval_data": [data(1)], **options},
            )  # fmt: skip
        except KeyboardInterrupt:
            return [], {}
        rows = history.rows()
        for row in rows:
            del row["took_s"]
        return rows, pipe.state_dict()


def seed() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)


def interrupt(state: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def stop(state: Any) -> None:
    state.stop()


@cache
def undisturbed(crew: Crew, make: Any, **options: Any) -> tuple[list[float], Any, Any]:
    """Return the losses, rows and weights of a fit without an end."""
    seed()
    record = Record()
    return record.losses, *train(crew, make(), EPOCHS, record, **options)


def check(crew: Crew, folder: Path, make: Any, first: Record, **options: Any) -> None:
    """Resume the fit whose first part `first` has recorded, and compare it with the undisturbed."""
    losses, wanted, weights = undisturbed(crew, make, **options)
    second = Record()
    torch.manual_seed(99)  # a new program may have drawn other numbers
    rows, state = train(crew, make(), EPOCHS, second, folder=folder, resume="auto", **options)
    assert first.losses + second.losses == losses
    assert 0 < len(second.losses) < len(losses)
    assert rows == wanted
    assert all(torch.equal(state[name], value) for name, value in weights.items())


ENDS: dict[str, Any] = {
    "the end of an epoch": (0, 0, None),
    "a stop": (2, 3, stop),
    "a stop at the last mini-batch": (2, 7, stop),
    "an interrupt": (2, 4, interrupt),
}


def loader_with_generator() -> DataLoader[Any]:
    return loader(3)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("make", [loader, loader_with_generator, augmented])
def test_a_fit_continues_bit_for_bit(crew: Crew, tmp_path: Path, end: str, make: Any) -> None:
    *at, act = ENDS[end]
    seed()
    first = Record((at[0], at[1]), act)
    train(crew, make(), EPOCHS if act else 2, first, folder=tmp_path)
    check(crew, tmp_path, make, first)


@pytest.mark.parametrize("at", [2, 5])
def test_an_interrupt_waits_for_the_end_of_an_update(crew: Crew, tmp_path: Path, at: int) -> None:
    """The folder of a fit with accumulated gradients changes no update."""
    seed()
    first = Record((2, at), interrupt)
    train(crew, loader(), EPOCHS, first, accumulate=2, folder=tmp_path)
    assert len(first.losses) == 7 + at + at % 2
    check(crew, tmp_path, loader, first, accumulate=2)


def test_an_interrupted_evaluation_is_done_again(crew: Crew, tmp_path: Path) -> None:
    class Interrupting:
        def __call__(self, epoch: int) -> Any:
            if epoch == 2:
                signal.raise_signal(signal.SIGINT)
            return [data(1)]

    seed()
    first = Record()
    train(crew, loader(), EPOCHS, first, folder=tmp_path, eval_data=Interrupting())
    assert first.calls == ["begin", "epoch 1", "end"]
    assert len(first.losses) == 14
    check(crew, tmp_path, loader, first)


def test_a_crash_continues_from_the_last_save(crew: Crew, tmp_path: Path) -> None:
    """Mini-batches after the last save are trained again, with the same losses."""

    def crash(state: Any) -> None:
        raise ZeroDivisionError

    seed()
    first = Record((2, 6), crash)
    with pytest.raises(ZeroDivisionError):
        train(crew, loader(), EPOCHS, first, folder=tmp_path, save_every=2)
    del first.losses[-2:]
    check(crew, tmp_path, loader, first)


def test_an_asynchronous_fit_continues_like_a_fit_that_flushed_there(
    crew: Crew, tmp_path: Path
) -> None:
    """All mini-batches have one size, because the first of another size flushes as well."""

    def fit(folder: str, record: Record, **options: Any) -> Any:
        options = {"schedule": "pipedream", "save_every": 4, "folder": tmp_path / folder, **options}
        return train(crew, loader(drop_last=True), EPOCHS, record, **options)

    whole, first, second = Record(), Record((2, 3), stop), Record()
    seed()
    wanted, weights = fit("a", whole)
    seed()
    fit("b", first)
    assert len(first.losses) == 10
    rows, state = fit("b", second, resume=True)
    assert first.losses + second.losses == whole.losses
    assert rows == wanted
    assert all(torch.equal(state[name], value) for name, value in weights.items())


class Stateful:
    """A loader that continues from its state, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self._next = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Any:
        x, y = data()
        while self._next < 6:
            lo, self._next = 4 * self._next, self._next + 1
            self.drawn.append(lo)
            yield x[lo : lo + 4], y[lo : lo + 4]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def test_a_loader_with_a_state_draws_nothing_twice(
    crew: Crew, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed()
    first = Record((2, 2), stop)
    train(crew, Stateful(), EPOCHS, first, folder=tmp_path)
    check(crew, tmp_path, Stateful, first)
    second = Stateful()
    (tmp_path / "b").mkdir()
    train(crew, Stateful(), EPOCHS, Record((2, 2), stop), folder=tmp_path / "b")
    capsys.readouterr()
    for folder in ("b", "b", "c"):
        train(crew, second, 2, folder=tmp_path / folder, resume="auto")
    train(crew, second, 2, folder=tmp_path / "c", resume="auto", progress=False)
    assert second.drawn[:4] == [8, 12, 16, 20]
    b, c = tmp_path / "b" / "last", tmp_path / "c" / "last"
    assert capsys.readouterr().err.splitlines() == [
        f"fit continues from {b}: epoch 2 of 2 after 2 mini-batches, update 9",
        f"fit has nothing to train: {b} has 2 of 2 epochs",
        f"fit begins anew: there is no checkpoint in {c}",
    ]


def test_other_mini_batches_and_other_checkpoints_are_refused(crew: Crew, tmp_path: Path) -> None:
    train(crew, loader(), 1, Record((1, 5), stop), folder=tmp_path)
    with pytest.raises(CheckpointError, match="epoch 1 has 2 mini-batches, and 5 were trained"):
        train(crew, loader(batch_size=13), 1, folder=tmp_path, resume=True)
    train(crew, loader(3), 1, Record((1, 5), stop), folder=tmp_path)
    with pytest.raises(CheckpointError, match="has 0 generators and had 1"):
        train(crew, loader(), 1, folder=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"resume=True: there is no checkpoint in .*auto"):
        train(crew, loader(), 1, folder=tmp_path / "other", resume=True)
    with open_fit(crew, model()) as pipe:
        pipe.save(tmp_path / "own" / "last", notes={"mine": [1, None, "two"]})
        with pytest.raises(CheckpointError, match="was not saved by fit"):
            pipe.fit(loader(), 1, folder=tmp_path / "own", resume="auto")
        assert pipe.restore(tmp_path / "own" / "last") == {"mine": [1, None, "two"]}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_pipeline_is_restored_between_mini_batches(
    crew: Crew, tmp_path: Path, schedule: str
) -> None:
    """Later training is lost, also under another plan than the checkpoint's."""
    batches = list(loader(3))[:6]
    with open_fit(crew, model(0.3), schedule=schedule, optimizer=hp.optim.adam(lr=0.1)) as pipe:
        list(pipe.run(batches[:3]))
        pipe.save(tmp_path)
        losses = [result.loss for result in pipe.run(batches[3:])]
        wanted = pipe.state_dict()
        for _ in pipe.run(batches):
            break
        pipe.restore(tmp_path)
        assert pipe.steps == 3
        assert [result.loss for result in pipe.run(batches[3:])] == losses
        assert all(torch.equal(pipe.state_dict()[name], value) for name, value in wanted.items())
    with open_fit(crew, model(0.3), cuts=[], optimizer=hp.optim.adam(lr=0.1)) as pipe:
        pipe.restore(tmp_path)
        found = [result.loss for result in pipe.run(batches[3:])]
        assert found == pytest.approx(losses) if schedule == "1f1b" else len(found) == 3
    with open_fit(crew, model(), optimizer=hp.optim.sgd(lr=0.1)) as pipe:
        with pytest.raises(CheckpointError, match="optimizer is adam"):
            pipe.restore(tmp_path)
        assert pipe.steps == 0
        assert [pipe.step(*batches[0]), pipe.step(*batches[0])][0] > 0


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hetpipe as hp

class Print(hp.callbacks.Callback):
    def step(self, state, result):
        print(result.index, result.loss.hex(), flush=True)

def main(folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    rule = hp.optim.from_torch(adam, torch.optim.lr_scheduler.StepLR(adam, 4, 0.7))
    x, y = torch.randn(80, 4), torch.randint(3, (80,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, num_workers=2)
    cluster = hp.Cluster.local(devices=["numpy:cpu:0"] * 2)
    options = {"optimizer": rule, "cuts": [1], "microbatches": 2, "schedule": "1f1b"}
    loss_fn = nn.functional.cross_entropy
    with hp.Pipeline(model, loss_fn, (x[:4], y[:4]), cluster=cluster, **options) as pipe:
        pipe.fit(loader, 3, callbacks=[Print()], folder=folder, resume="auto")
        print(sum(value.double().sum().item() for value in pipe.state_dict().values()).hex())

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        main(folder)
"""


@pytest.mark.slow
def test_ctrl_c_and_the_same_script_again(tmp_path: Path) -> None:
    """The signal reaches the whole group of processes, as a terminal's does, and workers of the
    loader. The second program also trains without an interrupt, into another folder."""
    script, folders = tmp_path / "script.py", [str(tmp_path / "a"), str(tmp_path / "b")]
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), folders[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        first = []
        for line in child.stdout:
            first.append(line)
            if line.startswith("26 "):
                os.killpg(child.pid, signal.SIGINT)
        assert child.stderr.read().rstrip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT
    assert 27 <= len(first) < 59
    second = subprocess.run(
        [sys.executable, str(script), *folders], capture_output=True, text=True, timeout=200
    )
    assert second.returncode == 0, second.stderr
    lines = second.stdout.splitlines(keepends=True)
    assert first + lines[:-61] == lines[-61:]
