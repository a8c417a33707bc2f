"""`Pipeline.fit` refuses every wrong argument before it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hetpipe.callbacks import BestCheckpoint, EarlyStopping, TensorBoard
from hetpipe.errors import HetpipeError
from hetpipe.loop.batches import Batches
from hetpipe.loop.options import task_of

DATA = [(1, 2)]


def metric(output: Any, y: Any) -> float:
    return 0.0


class Collecting:
    def update(self, output: Any, y: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs=0: give a whole number of 1 or more"),
    ({"epochs": True}, "epochs=True: give a whole number"),
    ({"batches": 7}, "batches is 7: give an iterable of mini-batches"),
    ({"batches": iter(DATA)}, "can be iterated only once, and epochs=2"),
    ({"eval_data": iter(DATA)}, "eval_data is .* can be iterated only once"),
    ({"metrics": {"a": metric}}, "metrics a need eval_data"),
    ({"metrics": [metric], "eval_data": DATA}, "metrics are list: give a dict"),
    ({"metrics": {"a": 3}, "eval_data": DATA}, "metric 'a' is 3: give a function"),
    ({"metrics": {"loss": metric}, "eval_data": DATA}, "must not be named 'loss'"),
    ({"metrics": {"a": Collecting()}, "eval_data": DATA}, r"metric 'a' .* no method reset\(\)"),
    ({"callbacks": [print]}, "a callback is .*: give objects whose class is a child of"),
    ({"callbacks": TensorBoard("runs")}, "callbacks is <.*TensorBoard .*: give a list of callb"),
    ({"val_data": DATA}, r"fit has no option 'val_data'; did you mean eval_data\? "),
    ({"patience": 2}, "patience=2 needs the value to watch: give monitor="),
    ({"mode": "min"}, "mode='min' needs the value to watch: give monitor="),
    ({"monitor": "loss"}, "monitor='loss' changes nothing alone"),
    ({"monitor": "loss", "patience": 0}, "patience=0: give a number of epochs"),
    ({"monitor": "loss", "patience": 1, "mode": "low"}, "mode='low': give 'min'"),
    ({"resume": "auto"}, "resume='auto' needs a folder"),
    ({"resume": "yes", "folder": "."}, "resume='yes': give True, False or 'auto'"),
    ({"save_every": 5}, "save_every=5 needs a folder"),
    ({"save_every": -1, "folder": "."}, "save_every=-1: give a whole number of 1 or more"),
    ({"pateince": 2}, r"fit has no option 'pateince'; did you mean patience\? "),
    ({"folder": "/dev/null/run"}, "folder='/dev/null/run' cannot be written: Not a directory"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = {"epochs": 2, "batches": DATA, "eval_data": None, "metrics": None, "callbacks": ()}
    arguments = [wrong.get(name, value) for name, value in given.items()]
    options = {name: value for name, value in wrong.items() if name not in given}
    with pytest.raises(HetpipeError, match=message):
        task_of(*arguments, options)  # type: ignore[arg-type]


def test_callbacks_check_their_arguments() -> None:
    with pytest.raises(HetpipeError, match="every=0"):
        TensorBoard("runs", every=0)
    with pytest.raises(HetpipeError, match="mode='low'"):
        BestCheckpoint("best", "loss", mode="low")
    with pytest.raises(HetpipeError, match="patience=True"):
        EarlyStopping("loss", True)


BATCHES: list[tuple[Any, Any, str]] = [
    ({"ids": 1, "labels": 2}, None, 'a batch of b is a dict with ids, labels: .* split="labels"'),
    ({"ids": 1, "target": 2}, None, 'split="target"'),
    ((1, 2, 3), None, r"a batch of b is a tuple of 3 entries, not a pair \(x, y\): give split="),
    (5, None, "a batch of b is a int, not a pair"),
    ((1, 2, 3), lambda batch: batch, r"the function split must return \(x, y\)"),
    ((1, 2), "labels", "names labels of a dict, and a batch of b is a tuple"),
    ({"ids": 1, "labels": 2}, "label", r"has no 'label'; did you mean labels\? "),
]


@pytest.mark.parametrize(("batch", "split", "message"), BATCHES)
def test_a_batch_that_is_no_pair_is_refused(batch: Any, split: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        Batches([], split, "b", 1).pair(batch)


def test_a_function_must_return_an_iterable() -> None:
    with pytest.raises(HetpipeError, match=re.escape("b(3) is None: return an iterable")):
        Batches(lambda epoch: None, None, "b", 9).of(3)  # type: ignore[arg-type,return-value]


def test_no_progress_is_shown_without_a_terminal(tmp_path: Path) -> None:
    assert task_of(1, DATA, None, None, (), {"folder": tmp_path / "new"}).callbacks == ()
    assert (tmp_path / "new").is_dir()
    assert len(task_of(1, DATA, None, None, (), {"progress": True}).callbacks) == 1
