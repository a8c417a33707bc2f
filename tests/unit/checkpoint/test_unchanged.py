"""Tensors that have not changed since the newest checkpoint are not written again."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from hetpipe import checkpoint
from hetpipe.checkpoint import durable
from hetpipe.checkpoint.series import Series
from hetpipe.errors import CheckpointError

Arrays = dict[str, np.ndarray[Any, Any]]
BEFORE = Path(__file__).parents[2] / "data" / "checkpoint"


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series(tmp_path / "run", keep=2)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files of tensors that were written."""
    sizes: list[int] = []
    write = durable.write

    def counted(path: Path, parts: Any) -> tuple[int, str]:
        nbytes, sha256 = write(path, parts)
        sizes.extend([nbytes] if path.name == ".param.partial" else [])
        return nbytes, sha256

    monkeypatch.setattr(durable, "write", counted)
    return sizes


def save(series: Series, step: int, arrays: Arrays) -> Path:
    return series.save({"param": arrays}, {"step": step})


def assert_holds(folder: Path, arrays: Arrays) -> None:
    """Check the values, by hetpipe and by safetensors, and that no file has another tensor."""
    found = checkpoint.load(folder).tensors["param"]
    assert sorted(found) == sorted(arrays)
    assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)
    tensors = [item for path in folder.glob("param-*") for item in load_file(path).items()]
    assert sorted(name for name, _ in tensors) == sorted(arrays)
    assert all(value.numpy().tobytes() == arrays[name].tobytes() for name, value in tensors)


def test_after_a_failed_write_a_frozen_tensor_is_still_linked(
    series: Series, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, parts: Any) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    frozen = np.arange(50_000.0)
    for step in range(1, 6):
        arrays = {"frozen": frozen, "head": np.full(100, float(step))}
        with monkeypatch.context() as patch:
            if step == 4:
                patch.setattr(durable, "write", fail)
                with pytest.raises(CheckpointError, match="No space left"):
                    save(series, step, arrays)
                continue
            folder = save(series, step, arrays)
    assert_holds(folder, arrays)
    assert written[-1] < frozen.nbytes


def test_a_frozen_tensor_is_written_twice(series: Series, written: list[int]) -> None:
    """The first file has all tensors, the second save divides it, and later saves link."""
    frozen = np.arange(50_000.0)
    for step in range(1, 6):
        folder = save(series, step, {"frozen": frozen, "head": np.full(100, float(step))})
        assert_holds(folder, {"frozen": frozen, "head": np.full(100, float(step))})
    large = [nbytes > frozen.nbytes for nbytes in written]
    assert large == [True, False, True, False, False, False]
    inodes = {path.stat().st_ino for path in series.directory.glob("step-*/param-*")}
    assert len(inodes) == 3  # two heads, one file of the frozen tensor
    assert len(list(series.directory.glob("step-*/param-*"))) == 4


def test_any_changes(series: Series) -> None:
    choose = random.Random(1)
    arrays: Arrays = {str(n): np.full(n % 3 + 1, float(n)) for n in range(8)}
    arrays |= {"empty": np.zeros((0, 2)), "scalar": np.array(np.nan)}
    history: dict[Path, Arrays] = {}
    for step in range(1, 40):
        for name in choose.sample(sorted(arrays), choose.choice([0, 1, 2, 8])):
            arrays[name] = arrays[name] + choose.random()
        if choose.random() < 0.2:
            name = choose.choice(sorted(arrays))
            arrays[name] = arrays[name].astype(choose.choice(["float32", "float64"]))
        history[save(series, step, dict(arrays))] = dict(arrays)
        if choose.random() < 0.2:
            series = Series(series.directory, 2)  # a restart
            series.hold()
            series.release()
        for folder in [*history][-2:]:
            assert_holds(folder, history[folder])
    assert len(list(series.directory.iterdir())) == 2


def test_the_same_bits_of_another_type_or_shape_have_changed(series: Series) -> None:
    bits = np.arange(6, dtype="int64")
    for step, arrays in enumerate([bits, bits.view("float64"), bits.reshape(2, 3)]):
        folder = save(series, step, {"w": arrays})
        found = checkpoint.load(folder).tensors["param"]["w"]
        assert (found.dtype, found.shape) == (arrays.dtype, arrays.shape)
        assert found.tobytes() == bits.tobytes()


def test_a_file_that_was_altered_meanwhile_is_written_again(series: Series) -> None:
    arrays = {"w": np.arange(9.0)}
    (path,) = save(series, 1, arrays).glob("param-*")
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\1")
    assert_holds(save(series, 2, arrays), arrays)
    with pytest.raises(CheckpointError, match="was altered"):
        checkpoint.load(path.parent)


def test_an_altered_header_fails_one_save(series: Series) -> None:
    """The next save links nothing."""
    arrays = {"w": np.arange(9.0)}
    (path,) = save(series, 1, arrays).glob("param-*")
    path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))
    with pytest.raises(CheckpointError, match="was altered"):
        save(series, 2, arrays)
    assert_holds(save(series, 3, arrays), arrays)


def test_file_systems_without_links(
    series: Series, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    arrays = {"w": np.arange(9.0)}
    for step in (1, 2, 3):
        assert_holds(save(series, step, arrays), arrays)
    assert len(written) == 3


def test_a_checkpoint_of_before_is_continued(series: Series) -> None:
    """Its version of the format has one file for each role."""
    shutil.copytree(BEFORE, series.directory / "step-00000003")
    found = series.hold()
    assert found is not None
    tensors = {role: named.arrays() for role, named in found.tensors.items()}
    folder = series.save(tensors, {"step": 4})
    series.release()
    files = [*folder.glob("*.safetensors")]
    assert {path.stat().st_nlink for path in files} == {2}
    assert checkpoint.load(series.directory).manifest == {"step": 4}
