"""The page on testing kernels: its files, command, fixture and cluster file work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetpipe.sdk.formats.kernelspec import KernelSpec
from hetpipe.sdk.host.registry import devices_of
from hetpipe.toml import parse_toml

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "testing-kernels.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(info.id == "opencl:pocl:0" for info in devices_of("opencl")):
        pytest.skip("PoCL is not here")
    path = tmp_path_factory.mktemp("page")
    (path / "gelu.cl").write_text(block("c"))
    (path / "gelu.toml").write_text(block("toml"))
    (path / "test_gelu.py").write_text(block("python"))
    return path


def run(folder: Path, *command: str) -> Any:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        timeout=250,
    )  # fmt: skip


def test_the_command(folder: Path) -> None:
    (line,) = re.findall(r"^    hetpipe (kernels test .*)$", PAGE, re.MULTILINE)
    done = run(folder, "-m", "hetpipe", *line.split(), "--json", "out.json")
    assert done.returncode == 0, done.stderr
    outcomes = json.loads((folder / "out.json").read_text())["outcomes"]
    assert len({each["device"] for each in outcomes}) > 1
    assert all(each["flaws"] == [] for each in outcomes)
    assert "my_gelu" in done.stdout

    wrong = (folder / "gelu.cl").read_text().replace("0.5f", "0.51f")
    (folder / "wrong.cl").write_text(wrong)
    done = run(
        folder, "-m", "hetpipe", "kernels", "test", "wrong.cl", "--spec", "gelu.toml",
        "--device", "opencl:pocl:0", "--case", "1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "wrong.cl:5" in done.stdout
    (again,) = re.findall(r"^    hetpipe (kernels test .*)$", done.stdout, re.MULTILINE)
    repeated = run(folder, "-m", "hetpipe", *again.split())
    assert repeated.returncode == 1
    assert re.findall("element .*", repeated.stdout) == re.findall("element .*", done.stdout)


def test_the_fixture(folder: Path) -> None:
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_gelu.py")
    assert "1 passed" in done.stdout


def test_the_line_of_the_cluster_file(folder: Path) -> None:
    from hetpipe.backends.opencl import OpenCLBackend

    data = parse_toml(block("toml", 1), folder / "cluster.toml", ValueError)  # type: ignore[arg-type]
    backend = OpenCLBackend()
    backend.configure(data["backend"]["opencl"], folder)
    assert all("kernels my_gelu" in info.driver for info in backend.discover())


def test_every_key_is_on_the_page() -> None:
    from dataclasses import fields

    from hetpipe.sdk.formats.kernelspec import Argument, Tolerance

    words = set(re.findall(r"`(\w+)`", PAGE)) | set(re.findall(r"`\[+(\w+)", PAGE))
    words |= {word for each in re.findall(r"`low` to `high`|`units`|`terms`", PAGE)
              for word in re.findall(r"\w+", each)}  # fmt: skip
    names = {field.name for kind in (KernelSpec, Argument, Tolerance) for field in fields(kind)}
    assert names - words == set()
