"""Devices for the tests of OpenCL's kernels, and limits for the rounding of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from found_devices import infos, opened, run, trace

EPS = float(np.finfo(np.float32).eps)
OPENCL = [i.id for i in infos() if i.backend == "opencl" and not i.capabilities.reference]
INTERPRETERS = [i.id for i in infos() if i.backend == "opencl" and i.capabilities.reference]


def outputs(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `fn` returns."""
    result = fn(*inputs)
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [item for item in found if item is not None]


def on_device(
    device_id: str, fn: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs of `fn` on the device; all outputs must be tensors."""
    graph = trace(fn, inputs, {})  # no decompositions: test the operators' own kernels
    arrays = run(opened(device_id), graph, [t.contiguous().numpy() for t in inputs])
    return [torch.from_numpy(array) for array in arrays]


def wide(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs in float64."""
    return [t.double() if t.is_floating_point() else t for t in inputs]


def check_sums(
    device_id: str, fn: Callable[..., Any], inputs: Sequence[torch.Tensor], terms: int
) -> None:
    """Check that errors stay under c sqrt(terms) eps fn(|inputs|); `fn` is linear in each input."""
    magnitudes = outputs(fn, [t.abs() for t in wide(inputs)])
    expected = outputs(fn, wide(inputs))
    found = on_device(device_id, fn, inputs)
    assert len(found) == len(expected)
    for got, want, magnitude in zip(found, expected, magnitudes, strict=True):
        assert got.shape == want.shape
        excess = (got.double() - want).abs() - 4 * math.sqrt(terms) * EPS * magnitude
        assert bool((excess <= 0).all()), f"too far by {excess.max():.1e} of {magnitude.max():.1e}"


def check_close(
    device_id: str, fn: Callable[..., Any], inputs: Sequence[torch.Tensor], ulps: float
) -> None:
    """Check every output within `ulps` eps of its largest magnitude (at least 1) in float64."""
    expected = outputs(fn, wide(inputs))
    found = on_device(device_id, fn, inputs)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(
            got.double(), want.double(), rtol=0, atol=ulps * EPS * scale, equal_nan=True
        )
