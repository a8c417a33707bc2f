"""Generated kernels are grouped into the same programs as in earlier processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hetpipe.backends.opencl.lower import launch as launches
from hetpipe.backends.opencl.lower.launch import Kernel
from hetpipe.backends.opencl.run import programs as groups
from hetpipe.backends.opencl.run.programs import Programs

from hetpipe.caches import CacheWarning


def kernel(name: str) -> Kernel:
    return Kernel(f"__kernel void {name}() {{}}", name, generated=True)


A, B, C, D = map(kernel, "abcd")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entries = groups.Entries("groups", "json", most=100)
    monkeypatch.setattr(groups, "GROUPS", entries)
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    return tmp_path / "groups"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of each program that is built, in order."""
    texts: list[str] = []

    def build(self: Programs, source: str, options: tuple[str, ...], name: str) -> Any:
        texts.append("".join(each for each in "abcd" if f"void {each}(" in source))
        return object()

    monkeypatch.setattr(Programs, "_build", build)
    return texts


def process() -> Programs:
    """Return the programs of a device in a new process."""
    return Programs(None, "opencl:none:0")


def test_the_next_process_makes_the_same_programs(built: list[str]) -> None:
    first = process()
    first.prepare([A, B])
    first.prepare([A, B, C])
    assert built == ["ab", "c"]
    process().prepare([C, B, A])
    assert sorted(built[2:]) == ["ab", "c"]


def test_a_new_kernel_joins_no_earlier_program(built: list[str]) -> None:
    process().prepare([A, B])
    second = process()
    second.prepare([B, D, C])
    assert built == ["ab", "ab", "cd"]
    second.prepare([A, D])
    assert len(built) == 3


def test_a_damaged_entry_causes_a_warning_and_is_replaced(built: list[str], folder: Path) -> None:
    process().prepare([A])
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-3])
    with pytest.warns(CacheWarning, match="checksum"):
        process().prepare([A, B])
    process().prepare([A])
    assert built == ["a", "ab", "ab"]


def test_kernels_of_another_version_share_no_program(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two versions may define other functions, so a program of both might not compile."""
    process().prepare([A, B])
    process().prepare([A])
    monkeypatch.setattr(groups, "helpers_identity", lambda: "of another version")
    process().prepare([A])
    assert built == ["ab", "ab", "a"]


def test_the_identity_of_helpers_depends_on_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launches.helpers_identity.__wrapped__()
    assert before == launches.helpers_identity.__wrapped__()
    monkeypatch.setattr(launches, "kernel_source", lambda file: f"another {file}")
    changed = launches.helpers_identity.__wrapped__()
    monkeypatch.setattr(launches, "HELPERS", {})
    assert len({before, changed, launches.helpers_identity.__wrapped__()}) == 3
