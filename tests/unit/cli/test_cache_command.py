"""`hetpipe cache`: folders, files and bytes; `clear` deletes files of caches and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import HetpipeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is Linux's")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two caches of the user, and a moved one beside other files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "moved"))
    monkeypatch.setattr("hetpipe.caches.temporary", lambda: tmp_path / "temporary")
    for name, nbytes in (
        ("user/hetpipe/captures/a.pickle", 7),
        ("user/hetpipe/opencl/programs/b.bin", 2048),
        ("moved/captures/c.pickle", 5),
        ("moved/opencl/programs/f.bin", 9),
        ("moved/thesis/d.tex", 3),
        ("temporary/tmp123/e", 1),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_caches_are_listed_with_files_and_bytes(base: Path) -> None:
    rows = json.loads(run("--json", "-"))["caches"]
    assert [(row["name"], row["files"], row["nbytes"]) for row in rows] == [
        ("captures", 1, 5),
        ("opencl", 1, 9),
        ("captures", 1, 7),
        ("opencl", 1, 2048),
    ]
    assert rows[0]["folder"] == str(base / "moved" / "captures")
    assert "2 KiB" in run()


def test_one_cache_or_all_are_cleared(base: Path) -> None:
    assert run("clear", "captures").count("deleted 1 files") == 2
    files = {path.name for path in base.rglob("*") if path.is_file()}
    assert files == {"b.bin", "f.bin", "d.tex", "e"}
    run("clear")
    assert {path.name for path in base.rglob("*") if path.is_file()} == {"d.tex", "e"}
    assert (base / "user" / "hetpipe" / "opencl" / "programs").is_dir()


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(HetpipeError, match=r"no cache 'capture'; did you mean captures\?"):
        run("clear", "capture")
