"""Errors in a user's module are reported as the user's, with only the user's traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from hetpipe.errors import HetpipeError, UserCodeError
from hetpipe.zoo import load_workload

HEAD = """
import torch, hetpipe as hp
mse = torch.nn.functional.mse_loss
def batches(n, seed):
    yield torch.zeros(n, 2), torch.zeros(n, 1)
    yield torch.zeros(n, 2), torch.zeros(n, 1)
def model(): return torch.nn.Linear(2, 1)
"""
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module into the working directory and returns its
    factory's name."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def module(text: str) -> str:
        (tmp_path / "own_model.py").write_text(HEAD + text)
        return "own_model:make"

    yield module
    sys.path[:] = path
    sys.modules.pop("own_model", None)


def refusal(name: str) -> str:
    with pytest.raises(HetpipeError) as caught:
        load_workload(name)
    return str(caught.value)


def test_an_exception_is_shown_without_hetpipes_frames(write: Write) -> None:
    text = refusal(write("def make(): return inner()\ndef inner(): raise ValueError('no data')\n"))
    first, *frames, last = text.splitlines()
    assert first == "own_model:make() failed"
    assert last == "ValueError: no data"
    files = [line for line in frames if line.lstrip().startswith("File ")]
    assert len(files) == 2
    assert all("own_model.py" in line for line in files)


def test_a_failed_import_is_the_users_error(write: Write) -> None:
    text = refusal(write("import not_there_at_all\n"))
    assert text.startswith("model 'own_model:make': its module failed\n")
    assert text.endswith("No module named 'not_there_at_all'")
    assert "hetpipe" not in text
    assert "importlib" not in text


def test_a_factory_with_arguments_is_the_users_error(write: Write) -> None:
    text = refusal(write("def make(size): pass\n"))
    assert text.endswith("TypeError: make() missing 1 required positional argument: 'size'")
    assert "Traceback" not in text, "no frame belongs to the user's code"


def test_a_script_that_exits_is_reported(write: Write) -> None:
    assert refusal(write("raise SystemExit(3)\n")).endswith("SystemExit: 3")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", "own_model:make() returned None; return hetpipe.Workload("),
        ("hp.Workload(torch.nn.Linear, mse, batches)", "Workload.model is the class Linear"),
        ("hp.Workload(model(), None, batches)", "Workload.loss_fn is None; give a function"),
        ("hp.Workload(model(), mse, [1, 2])", "Workload.batches is a list of 2; give a function"),
        ("hp.Workload(model(), mse, batches, name=3)", "Workload.name is 3"),
        ("hp.Workload(model(), mse, batches, mini_batch=0)", "Workload.mini_batch is 0"),
        (
            "hp.Workload(model(), mse, batches, optimizer=torch.optim.SGD([torch.ones(1)], 0.1))",
            "Workload.optimizer is a SGD; give one of hetpipe.optim",
        ),
        (
            "hp.Workload(model(), mse, batches, "
            "optimizer=hp.optim.from_torch(torch.optim.SGD([torch.ones(1)], 0.1)))",
            "Workload.optimizer is a Optimizer; give one of hetpipe.optim, such as adamw(lr=1e-3), "
            "or None: optimizers of torch are for hp.Pipeline",
        ),
        ("hp.Workload(model(), mse, batches, validate=1)", "Workload.validate is 1"),
        ("hp.Workload(model(), mse, batches, train_samples=1.5)", "train_samples is 1.5"),
        ("hp.Workload(model(), mse, batches, blocks='0')", "Workload.blocks is '0'"),
    ],
)
def test_a_wrong_workload_is_reported_with_its_field(write: Write, made: str, message: str) -> None:
    assert message in refusal(write(f"def make(): return {made}\n"))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("return 3", "batches(4, 0) returned 3; yield pairs"),
        ("return iter([torch.ones(4, 2)])", "yielded a Tensor as mini-batch 0; yield pairs"),
        ("return iter([(1, 2), (1, 2, 3)])", "yielded a tuple of 3 as mini-batch 1"),
        ("return iter([(1, 2)])", "batches(4, 0) ended after 1 mini-batches"),
    ],
)
def test_wrong_batches_are_reported(write: Write, batches: str, message: str) -> None:
    workload = load_workload(
        write(f"def own(n, seed): {batches}\ndef make(): return hp.Workload(model(), mse, own)\n")
    )
    with pytest.raises(HetpipeError) as caught:
        list(islice(workload.batches(4, 0), 3))
    assert message in str(caught.value)


def test_an_exception_in_batches_is_the_users_error(write: Write) -> None:
    text = (
        "def own(n, seed):\n    yield 1, 2\n    raise OSError('disk')\n"
        "def make(): return hp.Workload(model(), mse, own)\n"
    )
    workload = load_workload(write(text))
    with pytest.raises(UserCodeError) as caught:
        list(workload.batches(4, 0))
    assert str(caught.value).startswith("own_model:make(): batches(4, 0), at mini-batch 1, failed")
    assert "checked.py" not in str(caught.value)
    assert str(caught.value).endswith("OSError: disk")


def test_batches_may_end_after_the_requested_number(write: Write) -> None:
    workload = load_workload(write("def make(): return hp.Workload(model(), mse, batches)\n"))
    assert len(list(islice(workload.batches(4, 0), 2))) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [("return 3", "validate(model) returned 3"), ("return {'a': 'b'}", "could not convert")],
)
def test_a_wrong_validation_is_reported(write: Write, body: str, message: str) -> None:
    text = f"def own(model): {body}\ndef make(): return hp.Workload(model(), mse, batches, "
    workload = load_workload(write(f"{text}validate=own)\n"))
    assert workload.validate is not None
    with pytest.raises(HetpipeError) as caught:
        workload.validate(workload.model)
    assert message in str(caught.value)


def test_the_working_directory_comes_after_the_library(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's `netrc.py` there must not replace the standard library's."""
    (tmp_path / "netrc.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.delitem(sys.modules, "netrc", raising=False)
    text = "import netrc\ndef make(): return hp.Workload(model(), mse, batches)\n"
    assert load_workload(write(text)).name == "workload"


def test_a_module_without_the_factory_is_named_with_its_file(write: Write) -> None:
    assert "own_model.py) has no function 'make'" in refusal(write("x = 1\n"))
