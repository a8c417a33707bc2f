"""OpenCL batch and layer normalisation, forward and backward."""

from __future__ import annotations

import pytest
import torch
from opencl_products import INTERPRETERS, OPENCL, check_close, on_device

aten = torch.ops.aten
BATCH = [(4, 6, 8, 8), (3, 5, 7, 7), (5, 3, 2, 2), (16, 7), (2, 3, 20)]
LAYER = [((4, 6, 64), 1), ((3, 7), 1), ((2, 5, 3, 17), 2), ((1, 100), 1)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def channel_tensors(channels: int) -> tuple[torch.Tensor, ...]:
    """Return weight, bias, running mean and running variance."""
    values = random(4, channels)
    return values[0], values[1], values[2], values[3].abs() + 0.5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", BATCH, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_batch_norm(device_id: str, shape: tuple[int, ...], training: bool) -> None:
    inputs = (random(*shape) * 2 + 3, *channel_tensors(shape[1]))

    def fn(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
            *args, training, 0.1, 1e-5
        )
        return (y, mean, rstd, new_mean, new_var) if training else (y, new_mean, new_var)

    check_close(device_id, fn, inputs, 64)


@pytest.mark.parametrize("device_id", OPENCL)
def test_batch_norm_without_weights_or_statistics(device_id: str) -> None:
    x = random(4, 6, 5)
    check_close(
        device_id,
        lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5),
        (x,), 64,
    )  # fmt: skip
    check_close(
        device_id,
        lambda x, *rest: aten._native_batch_norm_legit_no_training(x, *rest, 0.1, 1e-5)[0],
        (x, *channel_tensors(6)), 64,
    )  # fmt: skip


@pytest.mark.parametrize("device_id", OPENCL)
def test_variance_survives_a_large_mean(device_id: str) -> None:
    """A one-pass variance would lose every digit, since the mean is 4000 times the deviation."""
    x = random(8, 3, 10, 10) + 4000
    weight, bias, mean, var = channel_tensors(3)
    _, _, rstd, _, _ = on_device(
        device_id,
        lambda *args: aten._native_batch_norm_legit_functional(*args, True, 0.1, 1e-5),
        (x, weight, bias, mean, var),
    )
    wide = x.double().transpose(0, 1).reshape(3, -1).var(1, unbiased=False)
    torch.testing.assert_close(rstd.double(), (wide + 1e-5).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.wide
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, True]])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", BATCH, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_batch_norm_backward(
    device_id: str, shape: tuple[int, ...], train: bool, mask: list[bool]
) -> None:
    x = random(*shape) * 2 + 3
    weight, _, mean, var = channel_tensors(shape[1])
    rows = x.transpose(0, 1).reshape(shape[1], -1)
    rstd = (rows.var(1, unbiased=False) + 1e-5).rsqrt()

    def fn(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = aten.native_batch_norm_backward(*args, train, 1e-5, mask)
        return tuple(each for each, want in zip(found, mask, strict=True) if want)

    inputs = (random(*shape[::-1]).reshape(shape), x, weight, mean, var, rows.mean(1), rstd)
    check_close(device_id, fn, inputs, 128)


@pytest.mark.parametrize(("shape", "dims"), LAYER, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_layer_norm(device_id: str, shape: tuple[int, ...], dims: int) -> None:
    normalized = list(shape[-dims:])
    x, weight, bias = random(*shape) + 2, random(*normalized), random(*normalized) * 2
    check_close(
        device_id, lambda *a: aten.native_layer_norm(a[0], normalized, a[1], a[2], 1e-5),
        (x, weight, bias), 64,
    )  # fmt: skip
    check_close(
        device_id, lambda x: aten.native_layer_norm(x, normalized, None, None, 1e-5), (x,), 64
    )
    _, mean, rstd = aten.native_layer_norm(x, normalized, weight, bias, 1e-5)

    def backward(dy: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, mean, rstd, weight, bias = rest
        found = aten.native_layer_norm_backward(
            dy, x, normalized, mean, rstd, weight, bias, [True, True, True]
        )
        return tuple(found)

    inputs = (random(*shape) * 3, x, mean, rstd, weight, bias)
    check_close(device_id, backward, inputs, 128)


@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_interpreted(device_id: str) -> None:
    inputs = (random(2, 3, 3, 3), *channel_tensors(3))
    check_close(
        device_id,
        lambda *a: aten._native_batch_norm_legit_functional(*a, True, 0.1, 1e-5), inputs, 64,
    )  # fmt: skip
