"""A run refuses buffers with shapes or dtypes its graph was not compiled for."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from found_devices import infos, opened, trace

from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import get_backend

DEVICES = [info.id for info in infos()]


@pytest.mark.parametrize("device_id", DEVICES)
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)],
         "input 1 is float32[3, 2], but the graph was compiled for float32[2, 3]"),
        ([np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32)],
         "input 0 is int64[2, 3], but the graph was compiled for float32[2, 3]"),
        ([np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32)],
         "input 0 is float32[1, 3], but the graph was compiled for float32[2, 3]"),
        ([np.zeros((2, 3), np.float32)],
         "the graph takes 2 inputs, got 1"),
    ],
)  # fmt: skip
def test_other_shapes_and_dtypes_are_refused(
    device_id: str, arrays: list[np.ndarray], message: str
) -> None:
    device = opened(device_id)
    table = get_backend(device.info.backend).decompositions()
    inputs = [torch.zeros(2, 3), torch.zeros(2, 3)]
    executable = device.compile(trace(lambda a, b: a + b, inputs, table))
    buffers = [device.upload(array)[0] for array in arrays]
    with pytest.raises(BackendError, match=re.escape(f"{device_id}: {message}")):
        executable.run(buffers)
