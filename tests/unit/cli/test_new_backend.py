"""`hetpipe new-backend` writes skeletons that run unchanged, and overwrites nothing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.check.selftest import selftest
from hetpipe.cli.app import app
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host import registry


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    monkeypatch.chdir(tmp_path)


def test_a_package_in_python(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new-backend", "my-npu"])
    assert done.exit_code == 0, done.output
    package = tmp_path / "my-npu"
    project = (package / "pyproject.toml").read_text()
    assert 'my-npu = "hetpipe_my_npu:MyNpuBackend"' in project
    assert "class TestMyNpu(BackendSuite)" in (package / "tests/test_conformance.py").read_text()
    texts = [path.read_text() for path in package.rglob("*") if path.is_file()]
    assert not any("keleton" in text for text in texts)
    spec = importlib.util.spec_from_file_location(
        "hetpipe_my_npu", package / "hetpipe_my_npu" / "__init__.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # registers the backend
    result = selftest(registry.open_device("my-npu:cpu:0"))
    assert result.ok, result.message


@pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("cc") is None, reason="no C compiler is here"
)
def test_a_library_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["new-backend", "chip", "--c", "--folder", "chips"])
    assert done.exit_code == 0, done.output
    subprocess.run(["make", "-C", "chips", "CFLAGS=-O0"], check=True, capture_output=True)
    monkeypatch.setenv("HETPIPE_NATIVE", str(tmp_path / "chips" / "libchip.so"))
    ids = [info.id for info in registry.devices_of("native")]
    assert ids[0] == "native:chip.cpu:0"
    result = selftest(registry.open_device(ids[0]))
    assert result.ok, result.message


@pytest.mark.parametrize("language", [[], ["--c"]], ids=["python", "c"])
def test_nothing_is_overwritten(language: list[str]) -> None:
    for _ in range(2):
        done = CliRunner().invoke(app, ["new-backend", "mine", *language])
    assert isinstance(done.exception, HetpipeError)
    assert "is there already; give another --folder" in str(done.exception)


@pytest.mark.parametrize("language", [[], ["--c"]], ids=["python", "c"])
@pytest.mark.parametrize("name", ["My", "7up", "a b", "../x"])
def test_a_name_that_ids_cannot_have(language: list[str], name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new-backend", name, *language])
    assert "a name is a lower-case letter" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_without_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    done = CliRunner().invoke(app, ["new-backend", "mine"])
    assert "no package has a skeleton in python" in str(done.exception)
