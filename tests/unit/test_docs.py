"""The backend of the guide is the skeleton, word for word, and its results match the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import run, trace
from torch import nn

from hetpipe.capture import capture
from hetpipe.check.selftest import selftest
from hetpipe.conformance.check import Level
from hetpipe.conformance.run import checks_of, rig_of, run_check
from hetpipe.optim import sgd
from hetpipe.sdk import primitive_decompositions
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host import registry
from hetpipe.sdk.host.registry import open_device

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
SKELETON = (ROOT / "hetpipe" / "sdk" / "skeleton" / "backend.py").read_text(encoding="utf-8")
MOST_LINES = 120
EMPTY = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Open the guide's device from its code."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(SKELETON, "docs/backends.md", "exec"), names)
    return open_device("skeleton:cpu:0")


def perceptron_programs() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = (torch.randn(4, 6), torch.tensor([0, 2, 1, 1]))
    captured = capture(model, nn.functional.cross_entropy, batch)
    (stage,) = captured.stage_graphs([], [primitive_decompositions()], [4], sgd(0.1, momentum=0.9))
    passes = stage.passes[4]
    return [passes.forward, passes.backward, stage.update]


def test_the_guide_shows_the_skeleton_and_it_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert code == SKELETON
    assert len(SKELETON.splitlines()) <= MOST_LINES


def test_the_guides_backend_passes_the_selftest(device: Device) -> None:
    result = selftest(device)
    assert result.ok, result.message


@pytest.mark.slow
def test_the_guides_backend_passes_the_operators_of_the_suite(device: Device) -> None:
    """`hetpipe conform` passes on a new backend before its author changes anything."""
    rig = rig_of(device.info.id)
    checks = [check for check in checks_of(Level.TRAINING) if check.name.startswith("operators/")]
    results = [run_check(check, rig) for check in checks]
    assert [f"{result.name}: {result.text}" for result in results if result.failed] == []
    assert sum(result.outcome == "passed" for result in results) >= 27


def test_the_guides_backend_writes_nothing_for_an_empty_index(device: Device) -> None:
    scatter = torch.ops.aten.scatter.value
    graph = trace(lambda x, i: scatter(x, 0, i, 2.0), [torch.ones(5), EMPTY], {})
    (written,) = run(device, graph, [np.ones(5, np.float32), EMPTY.numpy()])
    np.testing.assert_array_equal(written, np.ones(5, np.float32))


def test_the_guides_backend_trains_like_the_reference(device: Device) -> None:
    generator = np.random.default_rng(0)
    for program in perceptron_programs():
        arrays = [_example(slot, generator) for slot in program.inputs]
        results = []
        for each in (device, open_device("numpy:cpu:0")):
            results.append(run(each, program.graph, arrays))
        for result, expected in zip(*results, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def _example(slot: Any, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return random inputs: normal numbers, or classes 0 and 1 for integers."""
    if slot.dtype == "float32":
        return np.asarray(generator.standard_normal(slot.shape), slot.dtype)
    return np.asarray(generator.integers(0, 2, slot.shape), slot.dtype)
