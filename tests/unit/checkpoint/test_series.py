"""Several checkpoints of a training in one folder: the newest valid one counts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpipe import checkpoint
from hetpipe.checkpoint.series import Series, checkpoints
from hetpipe.errors import CheckpointError


def save(series: Series, step: int, nbytes: int = 80) -> Path:
    return series.save({"param": {"w": np.full(nbytes // 8, float(step))}}, {"step": step})


def step_of(folder: Path) -> int:
    saved = checkpoint.load(folder)
    (value,) = set(saved.tensors["param"]["w"].tolist())
    assert value == saved.manifest["step"]
    return int(value)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(folder: Path) -> Path:
    """Alter a byte of the folder's parameters."""
    (path,) = folder.glob("param-*")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return path


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series(tmp_path / "run", keep=2)


def test_the_newest_checkpoints_stay(series: Series) -> None:
    for step in (3, 6, 9):
        assert save(series, step).name == f"step-{step:08}"
        assert step_of(series.directory) == step
    assert steps(series.directory) == ["step-00000006", "step-00000009"]
    assert step_of(series.directory / "step-00000006") == 6


def test_steps_are_compared_as_numbers(series: Series) -> None:
    save(series, 99_999_999)
    save(series, 100_000_000)
    assert step_of(series.directory) == 100_000_000


def test_other_files_stay(series: Series) -> None:
    mine = save(series, 1) / "notes.txt"
    mine.write_text("mine")
    (series.directory / "log.csv").write_text("mine")
    save(series, 2)
    save(series, 3)
    assert mine.read_text() == "mine"
    assert os.listdir(mine.parent) == ["notes.txt"]
    assert (series.directory / "log.csv").exists()


def test_a_damaged_checkpoint_is_named_and_the_older_one_is_used(
    series: Series, caplog: pytest.LogCaptureFixture
) -> None:
    save(series, 1)
    path = damage(save(series, 2))
    assert step_of(series.directory) == 1
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "the older checkpoint in" in record.getMessage()
    damage(path.parent.parent / "step-00000001")
    with pytest.raises(CheckpointError, match=r"step-00000002/param-.* was altered"):
        checkpoint.load(series.directory)


def test_checkpoints_of_later_steps_were_given_up(series: Series) -> None:
    """After a restore of an older step, a restart must not continue from the newer steps."""
    for step in (2, 4, 3):
        save(series, step)
    assert steps(series.directory) == ["step-00000002", "step-00000003"]


def test_an_unfinished_write_is_no_checkpoint(series: Series) -> None:
    folder = save(series, 2)
    (folder / "manifest.json").unlink()
    assert series.hold() is None
    save(series, 4)
    assert steps(series.directory) == ["step-00000004"]
    series.release()


def test_a_checkpoint_in_the_folder_itself_counts_and_stays(series: Series) -> None:
    checkpoint.save(series.directory, {"param": {"w": np.full(3, 5.0)}}, {"step": 5})
    assert step_of(series.directory) == 5
    save(series, 4)
    assert step_of(series.directory) == 5
    save(series, 6)
    assert step_of(series.directory) == 6
    assert len(checkpoints(series.directory)) == 3
    (series.directory / "manifest.json").write_text("{")
    assert step_of(series.directory) == 6


def test_another_version_is_no_damage(series: Series) -> None:
    save(series, 1)
    path = save(series, 2) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    with pytest.raises(CheckpointError, match="has version 9"):
        checkpoint.load(series.directory)


def test_one_training_holds_a_folder(series: Series) -> None:
    assert series.hold() is None
    other = Series(series.directory, 2)
    with pytest.raises(CheckpointError, match=r"another training.* saves into .*run: end or close"):
        other.hold()
    series.release()
    assert other.hold() is None
    other.release()


def test_a_fork_does_not_keep_the_folder(series: Series) -> None:
    """The processes of a DataLoader may live longer than a killed training."""
    series.hold()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    try:
        series.release()
        assert Series(series.directory, 2).hold() is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_file_in_place_of_the_folder(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if kind == "file" else tmp_path / "file" / "run"
    with pytest.raises(CheckpointError, match=r"no checkpoint can be saved in .*file"):
        Series(folder, 2).hold()
    with pytest.raises(CheckpointError, match=r"file.*give the folder that a checkpoint"):
        checkpoint.load(folder)


TOUCH = {"open", "mkdir", "write", "flush", "fsync", "close", "replace", "unlink", "link", "rmdir"}
"""C functions through which a save touches the disk."""


@pytest.mark.slow
def test_a_save_killed_anywhere_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """The save links an unchanged file, and removes the only checkpoint before it."""

    def save(series: Series, step: int) -> None:
        arrays = {"frozen": np.ones(9), "head": np.full(3, float(step))}
        series.save({"param": arrays}, {"step": step})

    (first := Series(tmp_path / "first", 1)).hold()
    save(first, 1)
    save(first, 2)  # divides the file
    steps: list[int] = []
    while True:
        directory = tmp_path / str(len(steps))
        shutil.copytree(first.directory, directory)
        child = os.fork()
        if child == 0:
            series, events = Series(directory, 1), 0
            series.hold()

            def kill(frame: object, event: str, function: Any) -> None:
                nonlocal events
                if event == "c_return" and function.__name__ in TOUCH:
                    if events == len(steps):
                        os.kill(os.getpid(), signal.SIGKILL)
                    events += 1

            sys.setprofile(kill)
            save(series, 3)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        saved = checkpoint.load(directory)
        steps.append(saved.manifest["step"])
        assert saved.tensors["param"]["head"].tolist() == [steps[-1]] * 3
        assert saved.tensors["param"]["frozen"].tolist() == [1] * 9
        if status == 0:
            break
        (again := Series(directory, 1)).hold()
        save(again, 4)
        again.release()
        assert checkpoint.load(directory).manifest["step"] == 4
        assert os.listdir(directory) == ["step-00000004"]
        shutil.rmtree(directory)
    first.release()
    assert steps == sorted(steps)
    assert steps[-1] == 3
    assert steps.count(2) >= 10
    assert steps.count(3) >= 10


def test_a_folder_has_a_valid_checkpoint_at_every_moment(series: Series) -> None:
    """Kill a saving process, whose files take a moment each, at random times."""
    choose = random.Random(0)
    last = 0
    for _ in range(8):
        child = os.fork()
        if child == 0:
            for step in range(last + 1, last + 1000):
                save(series, step, nbytes=1 << 20)
            os._exit(1)
        time.sleep(choose.uniform(0.03, 0.12))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        if last or checkpoints(series.directory):
            found = step_of(series.directory)
            assert found >= last
            last = found
    assert last > 0
