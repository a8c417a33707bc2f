"""A command refuses a file that cannot be written before its work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.checkpoint.checkpoint import check_folder
from hetpipe.cli.app import app
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.files import check_target, write_beside
from hetpipe.study.largest import MOST, most

TRAIN = ("train", "mlp", "--devices", "numpy:cpu:0")


@pytest.mark.parametrize(
    "arguments",
    [
        (*TRAIN, "--picture", "file/a.png"),
        (*TRAIN, "--trace", "folder"),
        (*TRAIN, "--save", "file"),
        (*TRAIN, "--json", "folder"),
        ("plan", "mlp", "--out", "folder"),
        ("plan", "mlp", "--trace", "file/a.json"),
        ("report", "mlp", "--out", "folder"),
        ("bench", "--picture", "file/a.png"),
        ("kernels", "bench", "--picture", "file/a.png"),
        ("kernels", "tune", "--json", "folder"),
        ("zoo", "--json", "file/a.json"),
    ],
)
def test_no_work_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hetpipe.crew.crew.Crew.start", None)  # no command may get so far
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(HetpipeError, match=r"cannot write (folder: it is a folder|file/.*no fold)"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_train_refuses_a_folder_that_no_checkpoint_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpipe.crew.crew.Crew.start", None)  # the command must not get so far
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors"}}')
    with pytest.raises(CheckpointError, match="is of another program"):
        CliRunner().invoke(app, [*TRAIN, "--save", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(CheckpointError, match="cannot save a checkpoint in /proc/none/deep"):
        CliRunner().invoke(app, [*TRAIN, "--save", "/proc/none/deep"], catch_exceptions=False)


def test_a_check_of_a_folder_leaves_no_folder(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep")
    assert not list(tmp_path.iterdir())


def test_a_check_agrees_with_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o555)
    monkeypatch.chdir(tmp_path)
    for name in (
        "new",
        "file",
        "deep/new",
        ".",
        "..",
        "/",
        "file/new",
        "file/deep/new",
        "locked/new",
    ):
        fails = False
        try:
            check_target(Path(name))
        except HetpipeError:
            fails = True
        try:
            write_beside(Path(name), "x")
        except HetpipeError:
            assert fails, name
        else:
            assert not fails, name
    assert os.access("locked/new", os.F_OK) == (os.getuid() == 0)


def test_a_search_says_where_it_ends() -> None:
    assert [most(lambda n, top=top: n <= top) for top in (0, 1, 7, 8, 1000)] == [0, 1, 7, 8, 1000]
    assert most(lambda n: True) == MOST
