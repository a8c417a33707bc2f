"""OpenCL softmax and negative log likelihood, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from found_devices import opened, run, trace
from opencl_devices import close_to_torch, compiled, opencl_device
from opencl_products import INTERPRETERS, OPENCL, check_close, on_device

from hetpipe.errors import BackendError

aten = torch.ops.aten
SOFTMAX = [
    ((32, 10), 1), ((3, 50), -1), ((2, 3, 5, 7), 1), ((4, 100), 0), ((7,), 0), ((2, 3, 33), 1)
]  # fmt: skip
SCORES = [(32, 10), (300, 5), (2, 3, 4, 5), (6,)]
PAIRS = [
    (aten._softmax.default, aten._softmax_backward_data.default),
    (aten._log_softmax.default, aten._log_softmax_backward_data.default),
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("pair", PAIRS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "dim"), SOFTMAX, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_softmax(device_id: str, shape: tuple[int, ...], dim: int, pair: tuple[Any, Any]) -> None:
    forward, backward = pair
    x = random(*shape) * 3
    check_close(device_id, lambda x: forward(x, dim, False), (x,), 16)
    y, dy = forward(x, dim, False), random(*shape[::-1]).reshape(shape)
    check_close(device_id, lambda dy, y: backward(dy, y, dim, torch.float32), (dy, y), 32)


@pytest.mark.parametrize("device_id", OPENCL)
def test_softmax_of_large_and_masked_scores(device_id: str) -> None:
    x = random(5, 20) * 1000
    x[:, ::3] = -torch.inf
    for forward, _ in PAIRS:
        (found,) = on_device(device_id, lambda x, f=forward: f(x, 1, False), (x,))
        torch.testing.assert_close(found, forward(x, 1, False), rtol=1e-4, atol=1e-6)


def likelihood(shape: tuple[int, ...]) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return forward, backward, and (log-probabilities, targets with one ignored, weights)."""
    dim = 0 if len(shape) == 1 else 1
    target_shape = shape[:dim] + shape[dim + 1 :]
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, shape[dim], target_shape, generator=generator)
    if target.dim():
        target.view(-1)[0] = -100
    scores = torch.log_softmax(random(*shape), dim)
    inputs = [scores, target, random(shape[dim]).abs() + 0.5]
    if len(shape) == 4:
        return aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default, inputs
    return aten.nll_loss_forward.default, aten.nll_loss_backward.default, inputs


@pytest.mark.wide
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduction", range(3))
@pytest.mark.parametrize("shape", SCORES, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_nll(device_id: str, shape: tuple[int, ...], reduction: int, weighted: bool) -> None:
    forward, backward, (x, target, weight) = likelihood(shape)
    extra = [weight] if weighted else []

    def loss(x: Any, target: Any, weight: Any = None) -> Any:
        return forward(x, target, weight, reduction, -100)

    check_close(device_id, loss, (x, target, *extra), 64)
    value, total = loss(x, target, *extra)

    def gradient(dy: Any, x: Any, target: Any, total: Any, weight: Any = None) -> Any:
        return backward(dy, x, target, weight, reduction, -100, total)

    check_close(device_id, gradient, (random(*value.shape) + 1, x, target, total, *extra), 16)


@pytest.mark.parametrize("device_id", OPENCL)
def test_a_class_that_does_not_exist_is_refused(device_id: str) -> None:
    x, fine, wrong = random(3, 5), torch.tensor([1, 4, 2]), torch.tensor([1, 5, 2])
    graph = trace(lambda x, t: aten.nll_loss_forward(x, t, None, 1, -100), (x, fine), {})
    assert np.isfinite(run(opened(device_id), graph, [x.numpy(), fine.numpy()])[0])
    with pytest.raises(BackendError, match="index 5 is out of range for size 5"):
        run(opened(device_id), graph, [x.numpy(), wrong.numpy()])


@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_interpreted(device_id: str) -> None:
    check_close(device_id, lambda x: aten._log_softmax(x, 1, False), (random(2, 5),), 16)
    forward, _, (x, target, weight) = likelihood((4, 5))
    check_close(device_id, lambda *a: forward(*a, 1, -100), (x, target, weight), 32)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 35), (3, 16), (2, 20, 37)], ids=str)
@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("device_id", OPENCL)
def test_a_softmax_backward_may_write_over_its_operands(
    device_id: str, logarithm: bool, shape: tuple[int, ...]
) -> None:
    """Both operands are intermediates with no later reader, so the result may reuse either."""
    name = "_log_softmax_backward_data" if logarithm else "_softmax_backward_data"

    def fn(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        operator = getattr(torch.ops.aten, name).default
        dx = operator(torch.cumsum(dy, 0), torch.cumsum(y, 0), 1, dy.dtype)
        return torch.cumsum(dx, 0)

    dy, y = random(*shape), random(*shape[::-1]).reshape(shape) / 8
    executable = compiled(opencl_device(device_id), fn, dy, y)
    (launch,) = (each for each in executable.launches if "softmax_backward" in each.kernel.name)
    assert len(launch.inplace) == 2
    close_to_torch(opencl_device(device_id), fn, dy, y)
