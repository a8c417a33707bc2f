"""Files that threads and processes write at once are whole, and caches accept no files of
others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpipe import caches, files
from hetpipe.caches import CacheWarning, cache_folder, problem_of
from hetpipe.entries import Entries
from hetpipe.errors import HetpipeError
from hetpipe.files import read_bytes, user_path, write_beside

posix = pytest.mark.skipif(os.name != "posix", reason="the rules are those of POSIX")
as_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files to others"
)
OTHER = 12345


def test_threads_can_write_one_path_at_once(tmp_path: Path) -> None:
    """Each write succeeds, and each read finds one complete content."""
    path, errors = tmp_path / "x.json", list[object]()
    contents = [bytes([letter]) * (1 + 20_000 * (letter % 7)) for letter in b"abcdefgh"]
    write_beside(path, contents[0])

    def work(content: bytes) -> None:
        try:
            for _ in range(60):
                write_beside(path, content)
                read = path.read_bytes()
                if read not in contents:
                    errors.append(f"half a file of {len(read)} bytes")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is refused even if an attacker guesses the name of the new file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".0.partial").symlink_to(victim)
    monkeypatch.setattr(files.secrets, "token_hex", lambda nbytes: "0")
    with pytest.raises(HetpipeError, match="File exists"):
        write_beside(tmp_path / "x", b"planted")
    assert victim.read_text() == "precious"
    assert (tmp_path / ".0.partial").is_symlink()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")

    def full(file: Any) -> None:
        file.write(b"half")
        file.flush()
        raise OSError(28, "No space left on device")

    with pytest.raises(HetpipeError, match=r"cannot write .*x: No space left"):
        write_beside(tmp_path / "x", full)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


ENTRIES = Entries("kind", "bin", most=9)


@pytest.fixture
def entry_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store an entry named `key`; return its folder."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(caches.WARNED, "")
    ENTRIES.store("key", b"content")
    assert ENTRIES.load("key") == b"content"
    return tmp_path / "cache" / "kind"


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_key(path: Path) -> None:
    """Replace an entry by a complete one that belongs to another key."""
    ENTRIES.store("other", b"other")
    path.with_name("other.bin").replace(path)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "open to the group": (lambda path: path.chmod(0o660), "can be written by others .mode 660"),
    "open to all": (lambda path: path.chmod(0o606), "can be written by others"),
    "a link": (link, "symbolic link"),
    "a pipe": (pipe, "it is no regular file"),
    "another entry": (other_key, "its checksum does not match"),
    "an open folder": (lambda path: path.parent.chmod(0o777), "its folder can be written"),
}


@posix
@pytest.mark.parametrize("fault", FAULTS)
def test_an_entry_that_others_can_write_is_not_read(entry_folder: Path, fault: str) -> None:
    spoil, reason = FAULTS[fault]
    spoil(entry_folder / "key.bin")
    with pytest.warns(CacheWarning, match=f"will be made again: .*{reason}"):
        assert ENTRIES.load("key") is None


@as_root
@pytest.mark.parametrize("whose", ["entry", "folder"])
def test_an_entry_of_another_user_is_not_read(entry_folder: Path, whose: str) -> None:
    os.chown(entry_folder / "key.bin" if whose == "entry" else entry_folder, OTHER, OTHER)
    with pytest.warns(CacheWarning, match=f"belongs to user {OTHER}, not to 0"):
        assert ENTRIES.load("key") is None


@posix
def test_cache_folders_are_private(entry_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that an older version made for a group becomes private too."""
    assert entry_folder.stat().st_mode & 0o777 == 0o700
    assert (entry_folder / "key.bin").stat().st_mode & 0o777 == 0o600
    entry_folder.chmod(0o775)
    monkeypatch.setattr(caches, "_usable", set())
    assert cache_folder("kind") == entry_folder
    assert entry_folder.stat().st_mode & 0o777 == 0o700


@posix
def test_a_cache_below_a_writable_folder_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert f"others can write to {shared}; chmod go-w" in problem_of(shared / "mine" / "kind")
    shared.chmod(0o1777)  # like /tmp, where other users' names are safe
    assert problem_of(shared / "mine" / "kind") == ""


@as_root
def test_a_link_of_another_user_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "target")
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv(caches.WARNED, "")
    assert cache_folder("link") == tmp_path / "mine" / "link"
    os.chown(tmp_path / "mine" / "link", OTHER, OTHER, follow_symlinks=False)
    monkeypatch.setattr(caches, "_usable", set())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caches.temporary.cache_clear()
    with pytest.warns(CacheWarning, match=f"is a link of user {OTHER}"):
        assert cache_folder("link").parent == caches.temporary()
    caches.temporary.cache_clear()


@as_root
def test_a_parent_folder_of_another_user_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "mine").mkdir(parents=True)
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    assert problem_of(tmp_path / "theirs" / "mine").endswith(f"theirs belongs to user {OTHER}")


@posix
@pytest.mark.parametrize("what", ["pipe", "folder", "device", "large", "zero"])
def test_only_regular_files_are_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path = Path("/dev/zero")
    elif what == "large":
        with path.open("wb") as file:
            file.truncate(10**10)
    else:
        path = tmp_path / "a\0b"
    reasons = {
        "large": "10000000000 bytes; at most 67108864 are read", "folder": "it is a folder",
        "zero": "null byte",
    }  # fmt: skip
    with pytest.raises(OSError, match=reasons.get(what, "it is a pipe or a device")):
        read_bytes(path)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x") == tmp_path / "x"
    assert user_path("a~/x") == Path("a~/x")
    with pytest.raises(HetpipeError, match="home folder ~nobody-of-that-name is unknown"):
        user_path("~nobody-of-that-name/x")
    with pytest.raises(HetpipeError, match="no file can have"):
        user_path("a\0b")
