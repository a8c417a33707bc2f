"""Every script in `examples/` runs, and the README contains two of them word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.sdk.host.registry import devices_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = ("two_devices.py", "hugging_face.py")
LOSSES = re.compile(r"^(?:step \d+|loss) (\S+)$", re.MULTILINE)


def output_of(name: str, folder: Path) -> str:
    """Run an example as a user would, from another folder; return its output."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "HETPIPE_CACHE": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(texts: Sequence[str]) -> list[float]:
    return [float(text) for text in texts]


def test_the_readme_shows_two_examples() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert blocks == [(EXAMPLES / name).read_text(encoding="utf-8") for name in SHOWN]
    assert all(len(block.splitlines()) <= 25 for block in blocks)


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 6
    assert [name for name in names if f'output_of("{name}"' not in here] == []


@pytest.mark.slow
def test_two_devices(tmp_path: Path) -> None:
    text = output_of("two_devices.py", tmp_path)
    losses = numbers(LOSSES.findall(text))
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    alone = re.search(r"^torch alone (\S+)$", text, re.MULTILINE)
    assert alone is not None
    assert float(alone[1]) < losses[-1]
    for device in ("pytorch:cpu:0", "numpy:cpu:0"):
        assert re.search(rf"^\d .* {device} ", text, re.MULTILINE), text


def test_a_page_shows_lines_of_an_example() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.partition("## Optimizers\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    script = (EXAMPLES / "torch_optimizer.py").read_text(encoding="utf-8").splitlines()
    assert len(shown) >= 5
    assert [line for line in shown if line not in script] == []


@pytest.mark.slow
def test_torch_optimizer(tmp_path: Path) -> None:
    text = output_of("torch_optimizer.py", tmp_path)
    losses = numbers(LOSSES.findall(text))
    alone = numbers(re.findall(r"^torch \d+ (\S+)$", text, re.MULTILINE))
    assert len(losses) == len(alone) == 10
    assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_contrastive(tmp_path: Path) -> None:
    """The losses equal plain torch's, with the script's own model, loss and data."""
    text = output_of("contrastive.py", tmp_path)
    names: dict[str, Any] = {}
    script = (EXAMPLES / "contrastive.py").read_text(encoding="utf-8")
    exec(script.partition("cluster =")[0], names)
    model, loss_fn, x, y = (names[name] for name in ("model", "loss_fn", "x", "y"))
    adam, alone = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], lr=3e-3), []
    for _ in range(10):
        adam.zero_grad()
        loss = loss_fn(model(*x), y)
        loss.backward()
        adam.step()
        alone.append(loss.item())
    assert numbers(LOSSES.findall(text)) == pytest.approx(alone, rel=1e-5)
    (temperature,) = re.findall(r"^temperature (\S+)$", text, re.MULTILINE)
    assert float(temperature) == pytest.approx(loss_fn.scale.exp().item(), rel=1e-5)


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = numbers(LOSSES.findall(output_of("hugging_face.py", tmp_path)))
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_cnn(tmp_path: Path) -> None:
    accuracy = re.search(r"^accuracy (\S+)$", output_of("cnn.py", tmp_path), re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.slow
def test_asynchronous(tmp_path: Path) -> None:
    text = output_of("asynchronous.py", tmp_path)
    reached = dict(re.findall(r"^(\S+) accuracy (\S+)$", text, re.MULTILINE))
    assert set(reached) == {"1f1b", "pipedream"}
    assert min(numbers(list(reached.values()))) > 0.8


@pytest.mark.slow
def test_custom_backend(tmp_path: Path) -> None:
    text = output_of("custom_backend.py", tmp_path)
    losses = numbers(LOSSES.findall(text))
    assert losses == sorted(losses, reverse=True)
    assert "mine:cpu:0" in text
    assert "every stage agrees with torch" in text


@pytest.mark.slow
def test_plan_for_boards(tmp_path: Path) -> None:
    text = output_of("plan_for_boards.py", tmp_path)
    assert "modelled costs, exact plan" in text
    assert len(re.findall(r"waits \d+% of the step \(modelled\)", text)) == 3


@pytest.mark.slow
def test_opencl_kernel(tmp_path: Path) -> None:
    if not any(info.id == "opencl:oclgrind:0" for info in devices_of("opencl")):
        pytest.skip("no Oclgrind: install the extra `emulators`")
    text = output_of("opencl_kernel.py", tmp_path)
    assert "faults: []" in text
    assert "out of bounds" in text


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    lists = re.findall(r"\[(.*)\]", output_of("resume.py", tmp_path))
    same, other = (numbers(text.split(", ")) for text in lists)
    assert len(same) == 5
    assert other == pytest.approx(same, rel=1e-5)
