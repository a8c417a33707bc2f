"""The code in the documents runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetpipe.capture import capture
from hetpipe.optim import sgd
from hetpipe.sdk import registry
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.graph import core_decompositions
from hetpipe.sdk.registry import open_device
from hetpipe.sdk.selftest import selftest

GUIDE = Path(__file__).parents[2] / "docs" / "backends.md"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The guide's backend, from its code."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code[1], str(GUIDE), "exec"), names)
    return open_device("toy:cpu:0")


def perceptron_programs() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    captured = capture(model, nn.functional.mse_loss, (torch.randn(4, 6), torch.randn(4, 3)))
    (stage,) = captured.stage_graphs([], [core_decompositions()], [4], sgd(0.1, momentum=0.9))
    passes = stage.passes[4]
    return [passes.forward, passes.backward, stage.update]


def test_the_guides_backend_passes_the_selftest(toy: Device) -> None:
    result = selftest(toy)
    assert result.ok, result.message


def test_the_guides_backend_trains_a_perceptron_as_the_reference_does(
    toy: Device,
) -> None:
    generator = np.random.default_rng(0)
    for program in perceptron_programs():
        arrays = [
            generator.standard_normal(slot.shape).astype(slot.dtype) for slot in program.inputs
        ]
        results = []
        for device in (toy, open_device("numpy:cpu:0")):
            buffers: list[Buffer] = [device.upload(array)[0] for array in arrays]
            outputs, _, _ = device.compile(program.graph).run(buffers)
            results.append([np.empty(b.shape, b.dtype) for b in outputs])
            for buffer, array in zip(outputs, results[-1], strict=True):
                device.download(buffer, array)
        for found, expected in zip(*results, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
