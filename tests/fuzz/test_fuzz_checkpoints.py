"""Checkpoints: manifest, tensors and progress, also with damage under right checksums."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from damage import changed, dumped, spoilt
from documents import DATA, document
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st

from hetpipe import checkpoint
from hetpipe.checkpoint.manifest import FormatError, TensorFile, file_name
from hetpipe.checkpoint.stored import open_tensors
from hetpipe.errors import CheckpointError
from hetpipe.pipeline.resume import progress_of

MANIFEST = {key: value for key, value in document("checkpoint/manifest.json").items()
            if key != "sha256"}  # fmt: skip
TENSORS = [path.read_bytes() for path in sorted((DATA / "checkpoint").glob("*.safetensors"))]
DTYPES = st.sampled_from(["F32", "F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "U16", "C64", ""])
SIZES = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 1.5, None, "1"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def attempt(folder: Path, content: bytes) -> str:
    (folder / "manifest.json").write_bytes(content)
    read = result_of(lambda: checkpoint.load(folder), (CheckpointError, FormatError))
    if isinstance(read, str):
        assert read.startswith((str(folder), "the manifest is nested too deeply")), read
        return REFUSED
    progress = result_of(lambda: progress_of(read), (CheckpointError,))
    if isinstance(progress, str):
        assert progress.startswith("the checkpoint"), progress
        return REFUSED
    assert progress.updates_under(progress.plan)
    return ACCEPTED


def with_checksum(content: Any) -> bytes:
    """Return a manifest with the checksum of its content."""
    content = json.loads(dumped(content).replace(b"9" * 5000, b"9" * 50))
    sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    head = {"sha256": sha256} if isinstance(content, dict) else {}
    return json.dumps({**head, **content} if head else content, indent=1).encode()


def test_damaged_manifests(folder: Path) -> None:
    """After any change, the checksum does not match."""
    raw = (folder / "manifest.json").read_bytes()

    def check(content: bytes) -> str:
        outcome = attempt(folder, content)
        assert (outcome == ACCEPTED) == (content == raw)
        return outcome

    outcomes(spoilt(st.just(raw)), check)


def test_manifests_with_a_right_checksum(folder: Path) -> None:
    files = changed(st.just(MANIFEST)).map(with_checksum)
    check_both_ends(outcomes(files, lambda content: attempt(folder, content)))


def test_damaged_tensors(folder: Path) -> None:
    """After any change, the size or the checksum does not match."""
    path = next(folder.glob("param-*"))
    raw = path.read_bytes()

    def check(content: bytes) -> str:
        path.write_bytes(content)
        read = result_of(lambda: checkpoint.load(folder), (CheckpointError, FormatError))
        assert isinstance(read, str) == (content != raw)
        assert content == raw or str(path) in read
        return REFUSED

    outcomes(spoilt(st.just(raw)), check)


def attempt_tensors(folder: Path, content: bytes) -> str:
    """Read a file whose size and checksum match the manifest."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / file_name("param", 3, sha256)
    path.write_bytes(content)
    file = TensorFile(path.name, len(content), sha256, 4)
    read = result_of(lambda: open_tensors(path, file).arrays(), (CheckpointError,))
    path.unlink()
    if isinstance(read, str):
        assert re.search(re.escape(str(path)), read), read
        return REFUSED
    assert sum(array.nbytes for array in read.values()) <= len(content)
    return ACCEPTED


def safetensors(header: Any, data: bytes) -> bytes:
    text = dumped(header)
    return len(text).to_bytes(8, "little") + text + data


def test_tensors_with_a_right_checksum(tmp_path: Path) -> None:
    size = int.from_bytes(TENSORS[1][:8], "little")
    header, data = json.loads(TENSORS[1][8 : 8 + size]), TENSORS[1][8 + size :]
    offsets = st.lists(st.integers(0, 64) | SIZES, min_size=1, max_size=3)
    entry = st.fixed_dictionaries(
        {"dtype": DTYPES, "shape": st.lists(SIZES, max_size=3), "data_offsets": offsets}
    )
    headers = st.dictionaries(st.text(max_size=3), entry, max_size=3)
    headers = headers | changed(st.just(header)) | changed(st.just(header))
    files = st.builds(safetensors, headers, st.just(data) | st.binary(max_size=99))
    files = files | spoilt(st.sampled_from(TENSORS))
    check_both_ends(outcomes(files, lambda content: attempt_tensors(tmp_path, content)))
