"""Outputs of the FPGA emulator are sent in blocks of rows while their pass runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from found_devices import put
from opencl_devices import IDS, compiled, opencl_device, upload

from hetpipe.errors import BackendError

STREAMING = [each for each in IDS if opencl_device(each).info.capabilities.chunks]


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a product with an epilogue, and a sum of it."""
    y = torch.tanh(x @ w + b)
    return y.sum(), y


@pytest.mark.slow
@pytest.mark.parametrize("rows", [192, 500, 1000])
@pytest.mark.parametrize("device_id", STREAMING)
def test_chunks_are_ready_before_the_pass_ends(device_id: str, rows: int) -> None:
    device = opencl_device(device_id)
    inputs = [torch.randn(rows, 384), torch.randn(384, 320) / 20, torch.randn(320)]
    expected = layer(*inputs)[1].numpy().reshape(-1)
    buffers, events = upload(device, *inputs)
    outputs, event, chunks = compiled(device, layer, *inputs).run(buffers, after=events)
    assert [output for output, *_ in chunks] == [1] * 16
    bounds = [(lo, hi) for _, lo, hi, _ in chunks]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == expected.size
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    for _, lo, hi, ready in chunks:
        ready.wait()
        part = np.empty(hi - lo, np.float32)
        device.download_part(outputs[1], lo, hi, part).wait()
        np.testing.assert_allclose(part, expected[lo:hi], rtol=0, atol=1e-5)
    event.wait()
    ends = [ready.command.profile.end for *_, ready in chunks]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1] < event.command.profile.end


@pytest.mark.parametrize("device_id", STREAMING)
def test_few_rows_are_one_block(device_id: str) -> None:
    device = opencl_device(device_id)
    inputs = [torch.randn(64, 384), torch.randn(384, 320), torch.randn(320)]
    buffers, events = upload(device, *inputs)
    _, event, chunks = compiled(device, layer, *inputs).run(buffers, after=events)
    event.wait()
    assert chunks == []


@pytest.mark.slow
@pytest.mark.parametrize("device_id", [each for each in IDS if each not in STREAMING])
def test_other_devices_report_only_whole_passes(device_id: str) -> None:
    device = opencl_device(device_id)
    inputs = [torch.randn(200, 16), torch.randn(16, 20), torch.randn(20)]
    buffers, events = upload(device, *inputs)
    _, event, chunks = compiled(device, layer, *inputs).run(buffers, after=events)
    event.wait()
    assert chunks == []


@pytest.mark.parametrize("device_id", IDS)
def test_a_part_of_a_buffer_is_copied(device_id: str) -> None:
    device, other = opencl_device(device_id), opencl_device(IDS[0])
    array = np.arange(24, dtype=np.int64).reshape(4, 6)
    buffer = put(device, array)
    part = np.empty(7, np.int64)
    device.download_part(buffer, 5, 12, part).wait()
    np.testing.assert_array_equal(part, np.arange(5, 12))
    if other is not device:
        with pytest.raises(BackendError, match="not on"):
            other.download_part(buffer, 5, 12, part)
