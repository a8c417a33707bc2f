"""A cache whose folder is read-only or full moves to a private temporary folder, with one
warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe import caches
from hetpipe.caches import CacheWarning, cache_folder
from hetpipe.entries import Entries
from hetpipe.errors import HetpipeError
from hetpipe.profile import cache

Usage = namedtuple("Usage", ["free"])


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Redirect temporary folders to this test's folder."""
    monkeypatch.setenv(caches.WARNED, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caches.temporary.cache_clear()
    yield tmp_path
    caches.temporary.cache_clear()


def below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


@pytest.mark.parametrize("folder", [None, Path("/proc/hetpipe"), Path("/sys/hetpipe")])
def test_costs_are_stored_elsewhere_with_one_warning(
    private: Path, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = folder or below_a_file(private)
    monkeypatch.setenv("HETPIPE_CACHE", str(bad))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store("k", {"seconds": 0.25})
        assert cache.load("k") == {"seconds": 0.25}
        assert cache.load("other") is None
    (warned,) = caught
    assert warned.category is CacheWarning
    text = str(warned.message)
    assert text.startswith(f"no cache can be kept in {bad} (")
    assert f"make {bad} writable" in text
    assert "or set HETPIPE_CACHE to another folder" in text
    elsewhere = cache.folder()
    assert elsewhere.is_relative_to(private)
    assert str(elsewhere.parent) in text
    assert elsewhere.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_counts_as_unusable(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = private / "full"
    monkeypatch.setenv("HETPIPE_CACHE", str(full))

    def usage(folder: Path) -> Usage:
        return Usage(3 << 20 if folder.is_relative_to(full) else 1 << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.warns(CacheWarning, match=r"full \(3 MiB are free, 16 MiB are needed\)"):
        assert not cache_folder("costs").is_relative_to(full)


def test_a_child_process_does_not_warn_again(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(below_a_file(private)))
    with pytest.warns(CacheWarning):
        folder = cache.folder()
    code = "from hetpipe.profile import cache; print(cache.folder())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=os.environ | {"TMPDIR": str(private)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (str(folder), "")


def test_a_folder_of_another_user_is_not_used(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attackers can guess names below /tmp and write there."""
    planted = private / f"hetpipe-{os.getuid()}"
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    assert caches.temporary() != planted
    assert caches.temporary().stat().st_mode & 0o777 == 0o700


def test_no_place_at_all_is_an_error(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(below_a_file(private)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0))
    with pytest.raises(HetpipeError, match=r"neither .*file/cache .* nor .* set TMPDIR"):
        cache.folder()


def test_without_any_place_nothing_is_stored(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(below_a_file(private)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0))
    entries = Entries("kind", "bin", most=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store("k", {"seconds": 0.25})
        entries.store("k", b"content")
        assert cache.load("k") is None
        assert entries.load("k") is None
    (warned,) = caught
    assert warned.category is CacheWarning
    assert str(warned.message).endswith("nothing is kept, and each start computes everything again")


@pytest.mark.skipif(os.name != "posix", reason="the list of users is that of POSIX")
def test_a_user_without_a_home(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder must not get a folder named `~`."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "HETPIPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(private)
    with pytest.warns(CacheWarning, match=r"\(this user has no home folder and no entry"):
        assert cache_folder("costs") == caches.temporary() / "costs"
    assert [path.name for path in private.iterdir()] == [caches.temporary().name]


def test_a_good_folder_is_silent(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(private / "good"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.folder() == private / "good" / "costs"


@pytest.mark.parametrize("kind", caches.KINDS)
def test_one_variable_moves_every_cache(
    private: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(private / "user"))
    monkeypatch.setenv("HETPIPE_CACHE", str(private / "moved"))
    assert cache_folder(kind) == private / "moved" / kind
    Entries(kind, "bin", most=9).store("k", b"content")
    assert [path.parent.name for path in private.rglob("k.bin")] == [kind]
    assert not (private / "user").exists()
