"""Every script in `examples/` runs, and the README contains two of them word for word."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_folders import new_cache
from pages import run_python
from torch import nn

from hetpipe.sdk.host.registry import devices_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = ("two_devices.py", "hugging_face.py")
LOSSES = re.compile(r"^(?:step \d+|loss) (\S+)$", re.MULTILINE)
UPDATES = re.compile(r"^update (\d+) (\S+)$", re.MULTILINE)
ROWS = re.compile(r"^epoch (\d+) (\S+) (\S+)$", re.MULTILINE)


def output_of(name: str, folder: Path) -> str:
    """Run an example as a user would, from another folder; return its output."""
    return run_python([str(EXAMPLES / name)], folder)


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


def recipe(name: str, end: str) -> dict[str, Any]:
    """Run the part of an example before the line that begins with `end`; return its names."""
    text, _, rest = (EXAMPLES / name).read_text(encoding="utf-8").partition(f"\n{end}")
    assert rest
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(text, name, "exec"), names)
    return names


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    """The losses equal torch's, and the model goes on counting."""
    pytest.importorskip("transformers")
    text = output_of("gpt2.py", tmp_path)
    names = recipe("gpt2.py", "speeds")
    model, (x, labels) = names["model"], names["batch"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(**x, labels=labels).loss
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert numbers(LOSSES.findall(text)) == pytest.approx(wanted, rel=1e-5)
    assert "continued [10, 11, 12, 13, 14, 15, 16, 17]" in text


def classified() -> Iterator[tuple[list[float], float, float]]:
    """Train the classifier of bert.py in torch; yield losses, evaluated loss and accuracy of each
    epoch."""
    names = recipe("bert.py", "example")
    model, optimizer, scheduler = (names[each] for each in ("model", "optimizer", "scheduler"))
    next(iter(names["tests"]))  # the example draws a seed for worker processes
    while True:
        losses = []
        for batch in names["batches"]:
            optimizer.zero_grad()
            loss = model.train()(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        with torch.no_grad():
            batches = list(names["tests"])
            outputs = [model.eval()(**batch) for batch in batches]
        right = [
            (output.logits.argmax(-1) == batch["labels"]).float().mean().item()
            for output, batch in zip(outputs, batches, strict=True)
        ]
        yield losses, sum(output.loss.item() for output in outputs) / 2, sum(right) / 2


@pytest.mark.slow
def test_bert(tmp_path: Path) -> None:
    """Losses and accuracies equal torch's, also after an interrupt and a second start."""
    pytest.importorskip("transformers")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    text = output_of("bert.py", whole)
    updates, rows = dict(UPDATES.findall(text)), ROWS.findall(text)
    found, epochs = list(map(float, updates.values())), iter(classified())
    for number, (_, eval_loss, accuracy) in enumerate(rows):
        losses, mean, share = next(epochs)
        assert found[10 * number : 10 * number + 10] == pytest.approx(losses, rel=1e-4)
        assert (float(eval_loss), float(accuracy)) == pytest.approx((mean, share), rel=1e-4)
    assert 5 <= len(rows) < 12  # it stopped early
    assert float(rows[-1][2]) == 1.0

    first = interrupted("bert.py", parts, "update 13 ")
    assert 13 <= len(UPDATES.findall(first)) < len(updates)
    second = output_of("bert.py", parts)
    assert dict(UPDATES.findall(first) + UPDATES.findall(second)) == updates
    assert len(UPDATES.findall(first) + UPDATES.findall(second)) == len(updates)
    assert ROWS.findall(second) == rows


def interrupted(name: str, folder: Path, line: str) -> str:
    """Run an example, press Ctrl-C after it has printed a line, and return its output."""
    child = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "HETPIPE_CACHE": new_cache(folder / "cache")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    seen = ""
    for text in child.stdout:
        seen += text
        if text.startswith(line):
            child.send_signal(signal.SIGINT)
            break
    rest, errors = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in errors
    return seen + rest


@pytest.mark.slow
def test_resnet(tmp_path: Path) -> None:
    """The losses equal torch's with micro-batches under autocast; so does the average's loss."""
    text = output_of("resnet.py", tmp_path)
    names = recipe("resnet.py", "options")
    model, loader, optimizer, scheduler = (
        names[each] for each in ("model", "loader", "optimizer", "scheduler")
    )
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    loss_fn = nn.functional.cross_entropy
    next(iter(loader))
    wanted = []
    for x, y in (batch for _ in range(6) for batch in loader):
        optimizer.zero_grad()
        losses = []
        for part, labels in zip(x.split(16), y.split(16), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model(part), labels) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        wanted.append(sum(losses))
    assert numbers([loss for _, loss in UPDATES.findall(text)]) == pytest.approx(wanted, rel=1e-2)
    mean = re.search(r"^average (\S+)$", text, re.MULTILINE)
    assert mean is not None
    for buffer, value in zip(average.module.buffers(), model.buffers(), strict=True):
        buffer.copy_(value)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        average.eval()
        losses = [loss_fn(average(x), y).item() for x, y in loader]
    assert float(mean[1]) == pytest.approx(sum(losses) / len(losses), rel=1e-2)
