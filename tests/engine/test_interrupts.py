"""An interrupt skips or completes each mini-batch, and the pipeline stays usable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import user_pipeline
from priced import Speeds
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.learning import WINDOW

DEVICES = ("numpy:cpu:0",) * 2
X, Y = torch.linspace(-1, 1, 24).reshape(6, 4), torch.zeros(6)
LR = 0.125


def shift() -> nn.Linear:
    """Return a layer that adds a vector; its gradient is constant, so its value counts updates."""
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight.requires_grad_(False))
    nn.init.zeros_(layer.bias)
    return layer


def shifts(layers: int) -> nn.Module:
    return nn.Sequential(*(shift() for _ in range(layers)))


def sum_of_row(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return out.sum(1).mean() - y.mean()


def open_pipeline(crew: Crew, model: nn.Module | None = None, **options: Any) -> hp.Pipeline:
    options = {"cuts": [1], "microbatches": 2, "optimizer": hp.optim.sgd(lr=LR), **options}
    return user_pipeline(crew, model or shifts(2), sum_of_row, (X, Y), **options)


def updates(pipe: hp.Pipeline) -> list[float]:
    """Return the number of mini-batches in each parameter's value."""
    biases = [value for name, value in pipe.state_dict().items() if name.endswith("bias")]
    return (-torch.cat(biases) / LR).tolist()


def train(pipe: hp.Pipeline, count: int) -> None:
    for _ in pipe.run([(X, Y)] * count):
        pass


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Install a fresh program's signal handler, and check that it is still installed at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


class Interruption:
    """Sends SIGINT to this process at the `at`-th send to or wait for workers, counted from 0."""

    def __init__(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at, self._times = -1, 1
        for place, name in ((crew._fleet, "send"), (crew._control, "gather")):
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))

    def arm(self, at: int, times: int = 1) -> None:
        self._at, self._times = at, times

    @property
    def came(self) -> bool:
        return self._at < 0

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._at == 0:
                for _ in range(self._times):
                    signal.raise_signal(signal.SIGINT)
            self._at -= 1
            return function(*args, **kwargs)

        return counted


CALLS = (
    "step", "run", "evaluate", "predict_batches", "gradients", "state_dict", "flush", "save",
    "diagnose", "resize",
)  # fmt: skip
WHOLE = ("step", "gradients")  # calls that wait for the loss of a whole mini-batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "call"),
    [*product(("1f1b", "pipedream"), CALLS), *product(("gpipe",), WHOLE)],
)
def test_an_interrupt_anywhere(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, schedule: str, call: str, tmp_path: Path
) -> None:
    interruption, sizes = Interruption(crew, monkeypatch), iter(range(2, 1000))
    arguments: dict[str, tuple[Any, ...]] = {
        "state_dict": (), "flush": (), "save": (tmp_path,), "evaluate": ([(X, Y)] * 4,),
    }  # fmt: skip
    whole: dict[str, Any] = {"loss_over": "mini-batch"} if schedule == "gpipe" else {}
    with open_pipeline(crew, schedule=schedule, **whole) as pipe:

        def act() -> None:
            if call == "run":
                for _ in pipe.run([(X, Y)] * 3):
                    pass
            elif call == "predict_batches":
                for _ in pipe.predict_batches([X] * 4):
                    pass
            elif call == "resize":  # compiles stages for a new size
                size = next(sizes)
                pipe.step(X.repeat(size, 1), Y.repeat(size))
            else:
                getattr(pipe, call)(*arguments.get(call, (X, Y)))

        before = pipe.steps
        act()  # also compiles
        grows, at, interrupts = pipe.steps - before, 0, 0
        while True:
            before = pipe.steps
            interruption.arm(at)
            try:
                act()
            except KeyboardInterrupt:
                interrupts += 1
                assert interruption.came
            else:
                assert not interruption.came
            interruption.arm(-1)
            assert before <= pipe.steps <= before + grows
            assert updates(pipe) == [pipe.steps] * 8
            if not interrupts or at > 12:
                break
            interrupts, at = 0, at + 1 + at // 3
        assert at or call == "flush"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("call", ["rebalance", "auto", "corrected"])
def test_an_interrupt_while_layers_move_or_costs_are_probed(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, speeds: Speeds, schedule: str, call: str
) -> None:
    """A move completes, and training continues with the moved layers."""
    interruption, at, came = Interruption(crew, monkeypatch), 0, True
    model = shifts(4)
    captured = Captured(model, sum_of_row, (X, Y), samples=3)
    options: dict[str, Any] = {"schedule": schedule, "cuts": None, "captured": captured}
    if call == "auto":
        options["rebalance"] = "auto"
    while came:
        speeds.clear()
        with open_pipeline(crew, model, **options) as pipe:
            before = pipe.plan
            if call != "corrected":  # `corrected` probes only while there are no passes
                train(pipe, WINDOW)
            speeds["m0"] = 3.0
            if call == "auto":
                train(pipe, 2 * WINDOW)
            assert pipe.plan == before
            steps = pipe.steps
            interruption.arm(at)
            try:
                if call == "auto":
                    train(pipe, 1)
                else:
                    getattr(pipe, call)()
            except KeyboardInterrupt:
                assert interruption.came
            else:
                came = interruption.came
                assert not came
            interruption.arm(-1)
            pipe.flush()
            assert (pipe.plan != before) == (call != "corrected")
            assert steps <= pipe.steps <= steps + (call == "auto")
            steps = pipe.steps
            train(pipe, 2)
            assert pipe.steps == steps + 2
            assert updates(pipe) == [steps + 2] * 16
        at += 1 + at
    assert at > 3


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_a_second_interrupt_closes_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, saved: bool, tmp_path: Path
) -> None:
    cluster = Cluster.local(devices=DEVICES)
    crew = Crew.start(cluster)
    with crew, open_pipeline(crew) as pipe:
        pipe.step(X, Y)
        if saved:
            pipe.save(tmp_path)
        pipe.step(X, Y)
        Interruption(crew, monkeypatch).arm(1, times=2)
        where = f"step 1 in {tmp_path}" if saved else "no checkpoint of it was saved"
        with pytest.raises(KeyboardInterrupt, match="closed this pipeline at step 2;") as caught:
            pipe.step(X, Y)
        assert where in str(caught.value)
        for call in (lambda: pipe.step(X, Y), pipe.state_dict):
            with pytest.raises(HetpipeError) as refused:
                call()
            assert str(refused.value) == str(caught.value)


def test_a_handler_of_the_user_is_called_at_the_end(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the handler raises nothing, no result is lost."""
    steps: list[int] = []
    with open_pipeline(crew) as pipe:
        signal.signal(signal.SIGINT, lambda number, frame: steps.append(pipe.steps))
        Interruption(crew, monkeypatch).arm(0)
        pipe.step(X, Y)
        assert steps == [1]
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_interrupt_in_the_body_of_a_loop(crew: Crew, schedule: str) -> None:
    def interrupted() -> None:
        for result in pipe.run([(X, Y)] * 6):
            if result.index == 1:
                signal.raise_signal(signal.SIGINT)

    with open_pipeline(crew, schedule=schedule) as pipe:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        before = pipe.steps
        indices = [result.index for result in pipe.run([(X, Y)] * 3)]
        assert indices == [before, before + 1, before + 2]  # the ones under way give no results
        assert updates(pipe) == [before + 3] * 8


def _raises(after: int, error: BaseException) -> Iterator[tuple[Any, Any]]:
    for _ in range(after):
        yield X, Y
    raise error


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_exception_of_the_batches_loses_no_result(crew: Crew, schedule: str) -> None:
    with open_pipeline(crew, schedule=schedule) as pipe:
        for batches, error in (
            (_raises(5, ValueError("no file")), ValueError),
            ([*[(X, Y)] * 5, (X[:, :3], Y)], HetpipeError),
        ):
            first, results = pipe.steps, pipe.run(batches)
            assert [next(results).index for _ in range(5)] == list(range(first, first + 5))
            with pytest.raises(error):
                next(results)
        with pytest.raises(KeyboardInterrupt):
            list(pipe.run(_raises(5, KeyboardInterrupt())))
        assert updates(pipe) == [15] * 8
