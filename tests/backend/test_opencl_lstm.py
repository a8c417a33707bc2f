"""OpenCL LSTM layers against float64: sizes that fill no tile, and small and large batches."""

from __future__ import annotations

import pytest
import torch
from opencl_devices import close_to_torch, opencl_device, results
from opencl_products import OPENCL

import hetpipe.sdk.operators.recurrent  # defines the operators  # noqa: F401

own = torch.ops.hetpipe
SIZES = [(3, 1, 5), (2, 13, 33), (1, 32, 64)]
"""Steps, samples and units."""


def layer(steps: int, samples: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Return gates_x, h0, c0 and w_hh; some gates are far from zero."""
    torch.manual_seed(steps + samples + hidden)
    gates_x = torch.randn(steps, samples, 4 * hidden) * 3
    gates_x[0, 0, ::3] = 40.0
    gates_x[0, 0, 1::3] = -95.0
    states = torch.randn(2, samples, hidden)
    return gates_x, states[0].contiguous(), states[1].contiguous(), torch.randn(4 * hidden, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_lstm(device_id: str, sizes: tuple[int, int, int]) -> None:
    device = opencl_device(device_id)
    inputs = layer(*sizes)
    close_to_torch(device, own.lstm, *inputs)
    *_, w_hh = inputs
    turned = w_hh.t().contiguous()
    close_to_torch(device, lambda *xs: own.lstm(*xs[:-1], xs[-1].t()), *inputs[:-1], turned)


@pytest.mark.slow
@pytest.mark.parametrize("carried", [True, False], ids=["last_c", "no_last_c"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_lstm_backward(device_id: str, sizes: tuple[int, int, int], carried: bool) -> None:
    gates_x, h0, c0, w_hh = layer(*sizes)
    y, c, gates = own.lstm(gates_x, h0, c0, w_hh)
    grad_y, grad_last_c = torch.randn_like(y), torch.randn_like(c0)

    def backward(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return own.lstm_backward(xs[0], xs[1] if carried else None, *xs[2:])

    inputs = (grad_y, grad_last_c, gates, c, c0, w_hh)
    close_to_torch(opencl_device(device_id), backward, *inputs)


@pytest.mark.parametrize("device_id", OPENCL)
def test_runs_are_equal_bit_for_bit(device_id: str) -> None:
    device, inputs = opencl_device(device_id), layer(3, 13, 33)
    first, second = (results(device, own.lstm, *inputs) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one == other).all()
