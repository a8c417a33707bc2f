"""hetpipe installed from a wheel: its files, the README's scripts and the guide's commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIMIT_S = 250


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a virtual environment with only hetpipe from a wheel and links to its dependencies."""
    folder = tmp_path_factory.mktemp("guide")
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    python = folder / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([str(python), "-c", code], folder).strip())
    link(dependencies("hetpipe") - {"hetpipe"}, site)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("hetpipe-*.whl")
    run([*pip, "install", "--no-deps", str(wheel)], folder)
    variables = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTEST_CURRENT_TEST", "VIRTUAL_ENV")
    }
    path = f"{python.parent}{os.pathsep}{variables['PATH']}"
    return {
        **variables,
        "PATH": path,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "GUIDE": str(folder),
        "SITE": str(site),
    }


def dependencies(name: str) -> set[str]:
    """Return the names of all distributions that an installation without extras contains."""
    names, waiting = set[str](), [name]
    while waiting:
        each = waiting.pop()
        if each in names:
            continue
        names.add(each)
        for line in metadata.requires(each) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return names


def link(distributions: set[str], site: Path) -> None:
    """Link installed distributions into another environment's folder of packages."""
    for entry in entries(distributions):
        if not (site / entry).exists():
            (site / entry).symlink_to(Path(sysconfig.get_path("purelib"), entry))


def entries(distributions: set[str]) -> set[str]:
    """Return the entries of these distributions in the packages folder."""
    files = (file for name in distributions for file in metadata.files(name) or ())
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


def run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(page: str) -> list[str]:
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.slow
def test_the_guide_trains_a_stage(environment: dict[str, str]) -> None:
    folder = Path(environment["GUIDE"])
    output = {
        command: run(["bash", "-c", command], folder, environment)
        for command in commands("backends.md")
    }
    for command, text in output.items():
        print(f"$ {command}\n{text}")
    devices, train = (
        next(text for command, text in output.items() if f"hetpipe {name}" in command)
        for name in ("devices", "train")
    )
    assert "skeleton:cpu:0" in devices
    assert "hetpipe-skeleton 0.1.0" in devices.replace("\n", "")
    assert "equal" in train


def test_the_wheel_has_every_file_of_its_packages(environment: dict[str, str]) -> None:
    """Data files are kernels, boards, clusters of papers, skeletons, headers and the C example."""
    folders = {"hetpipe": "hetpipe"} | {
        name: f"hetpipe/{name}" for name in ("backends", "kernels", "boards")
    }
    sources = {
        f"{target}/{path.relative_to(ROOT / name).as_posix()}"
        for name, target in folders.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not {"__pycache__", "build"} & set(path.parts)
    }
    (wheel,) = Path(environment["GUIDE"]).glob("hetpipe-*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sorted(sources - packed) == []
    assert sorted(name for name in packed if not name.startswith("hetpipe/")) == []


@pytest.mark.slow
def test_the_doctor_runs_from_a_wheel(environment: dict[str, str]) -> None:
    text = run(["hetpipe", "doctor"], Path(environment["GUIDE"]), environment)
    assert "pytorch:cpu:0" in text
    assert "numpy:cpu:0" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_devices.py", "hugging_face.py"])
def test_the_scripts_of_the_readme_run_from_a_wheel(environment: dict[str, str], name: str) -> None:
    pytest.importorskip("transformers")
    link(dependencies("transformers"), Path(environment["SITE"]))
    script = ROOT / "examples" / name
    text = run(["python", str(script)], Path(environment["GUIDE"]), environment)
    assert len(re.findall(r"^step \d+ \S+$", text, re.MULTILINE)) == 10
