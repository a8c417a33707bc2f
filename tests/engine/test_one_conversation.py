"""A pipeline allows one exchange with its workers at a time.

Calls between two results of a stream lose no result, and calls that would mix two exchanges are
refused by name.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP, batches
from pipelines import user_pipeline

import hetpipe as hp
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, PlanError

DEVICES = ("numpy:cpu:0",) * 2


def open_pipeline(crew: Crew, **options: Any) -> hp.Pipeline:
    torch.manual_seed(0)
    options = {"cuts": [2], "schedule": "pipedream", **options}
    return user_pipeline(crew, MLP(), F.cross_entropy, batches(1)[0], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["save", "evaluate", "predict", "state_dict", "flush", "gradients"]
)
def test_calls_between_two_results_lose_none(crew: Crew, call: str, tmp_path: Path) -> None:
    data = batches(12)
    arguments: dict[str, tuple[Any, ...]] = {
        "save": (tmp_path,), "evaluate": (data[:2],), "gradients": data[0],
        "predict": (data[0][0],),
    }  # fmt: skip
    with open_pipeline(crew) as pipe:
        indices = []
        for result in pipe.run(data):
            indices.append(result.index)
            if result.index in (2, 6):
                getattr(pipe, call)(*arguments.get(call, ()))
    assert indices == list(range(12))


def test_leaving_a_run_early_ends_it(crew: Crew) -> None:
    data = batches(6)
    with open_pipeline(crew) as pipe:
        for result in pipe.run(data):
            if result.index == 1:
                break
        again = [result.index for result in pipe.run(data[:3])]
    assert again == [pipe.steps - 3, pipe.steps - 2, pipe.steps - 1]


def test_a_run_continues_from_a_restored_checkpoint(crew: Crew, tmp_path: Path) -> None:
    with open_pipeline(crew) as pipe:
        pipe.save(tmp_path)
        assert len(list(pipe.run(batches(5)))) == 5
        run = pipe.run(batches(6))
        indices = [next(run).index]
        pipe.restore(tmp_path)
        indices += [result.index for result in run]
    assert len(indices) == 6
    assert indices[-1] < 5


def test_two_runs_at_once_are_refused(crew: Crew) -> None:
    with open_pipeline(crew) as pipe:
        first = pipe.run(batches(6))
        next(first)
        with pytest.raises(HetpipeError, match="another run of this pipeline still has results"):
            next(pipe.run(batches(2)))
        assert [result.index for result in first] == [1, 2, 3, 4, 5]
        assert [result.index for result in pipe.run(batches(2))] == [6, 7]


@pytest.mark.slow
def test_two_threads_are_refused(crew: Crew) -> None:
    """The second thread calls during a step of the first."""
    with open_pipeline(crew, schedule="1f1b") as pipe:
        errors: list[str] = []

        def second() -> None:
            try:
                pipe.state_dict()
            except HetpipeError as error:
                errors.append(str(error))

        def step_beside_second(*args: Any) -> Any:
            thread = threading.Thread(target=second, name="second")
            thread.start()
            thread.join()
            return step(*args)

        training = pipe._training
        step = training.step
        training.step = step_beside_second  # type: ignore[method-assign]
        pipe.step(*batches(1)[0])
        assert len(errors) == 1
        assert "thread 'second' while another thread is in a call" in errors[0]
        training.step = step  # type: ignore[method-assign]
        pipe.step(*batches(1)[0])


def test_the_first_of_two_pipelines_on_a_crew_is_refused(crew: Crew) -> None:
    with open_pipeline(crew, schedule="1f1b") as first:
        first.step(*batches(1)[0])
        with open_pipeline(crew, schedule="1f1b") as second:
            for use in (first.state_dict, lambda: first.step(*batches(1)[0])):
                with pytest.raises(HetpipeError, match="has the stages of another pipeline"):
                    use()
            second.step(*batches(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches=0: give a whole number of 1 or more"),
        ({"microbatches": "4"}, "microbatches='4': give a whole number"),
        ({"microbatches": 2.0}, "microbatches=2.0: give a whole number"),
        ({"microbatches": True}, "microbatches=True: give a whole number"),
        ({"micro_batches": 4}, "no option 'micro_batches'; did you mean microbatches"),
        ({"accumulate": 0}, "accumulate=0: give a whole number"),
        ({"clip_norm": float("inf")}, "clip_norm=inf: give a finite number above 0"),
        ({"loss_scale": "big"}, "loss_scale='big': give a finite number above 0, or hp.LossScale"),
        ({"schedule": "dapple"}, "no schedule 'dapple'; known: 1f1b"),
        ({"schedule": "1f1b", "weights": "stash"}, "1f1b is synchronous and weights='stash' does"),
        ({"weights": "stash"}, "weights='stash' goes with an asynchronous schedule"),
        ({"cuts": [3, 2]}, r"cuts \[3, 2\]: give indices of layers in ascending order"),
        ({"cuts": [1], "replicas": [1]}, r"replicas \[1\] are of 1 stages, and cuts \[1\] make 2"),
        ({"seed": "x"}, "seed='x': give a whole number"),
    ],
)
def test_options_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    """There is no crew, so starting one or capturing the model would raise another error."""
    with pytest.raises(HetpipeError, match=message):
        hp.Pipeline(
            None, None, None, cluster=None, optimizer=hp.optim.sgd(lr=0.1), **options  # type: ignore[arg-type]
        )  # fmt: skip


def test_an_impossible_cut_lists_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(crew: Crew) -> Any:
        raise AssertionError("a worker was waited for")

    monkeypatch.setattr(Crew, "_await_devices", wait)
    cluster = Cluster.local(devices=["numpy:cpu:0"])
    with pytest.raises(PlanError, match=r"1 to \d+ of this model") as refusal:
        hp.Pipeline(
            MLP(), F.cross_entropy, batches(1)[0], cluster=cluster, cuts=[20],
            optimizer=hp.optim.sgd(lr=0.1),
        )  # fmt: skip
    assert "\n    0  " in str(refusal.value)
