"""Fused kernels: broadcasting, views, casts, sharing and in-place memory, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from found_devices import fetch, trace
from hetpipe.backends.opencl.lower.lowering import lower
from opencl_devices import (
    IDS,
    close_to_torch,
    compiled,
    opencl_device,
    results,
    upload,
)

from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.operators.random import keep_mask

pytestmark = pytest.mark.parametrize("device_id", IDS)

SHAPES = [(3, 5, 34), (2, 4, 16), (40,), (1, 7), (), (17, 1, 3)]


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chain_of_every_shape(device_id: str, shape: tuple[int, ...]) -> None:
    x, y = tensors(shape, shape)
    close_to_torch(
        opencl_device(device_id),
        lambda a, b: (torch.tanh(a) * b - 0.5 * a.exp(), torch.where(a > b, a, -b), a.sigmoid()),
        x,
        y,
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_of_every_axis(device_id: str, axis: int) -> None:
    sizes = [3, 5, 33]
    x, v, s = tensors(tuple(sizes), (sizes[axis],), ())
    shape = [1, 1, 1]
    shape[axis] = sizes[axis]
    close_to_torch(
        opencl_device(device_id),
        lambda a, b, c: (a * b.view(shape) + c) / (1 + (b * b).exp().view(shape)),
        x,
        v,
        s,
    )


def test_views_cost_no_kernel(device_id: str) -> None:
    (x,) = tensors((4, 6, 20))

    def fn(a: torch.Tensor) -> torch.Tensor:
        b = a.permute(2, 0, 1)[3:17:2].reshape(7, 24).t().flip(0)[:, 1:]
        return b.unsqueeze(1).expand(24, 3, 6) * 2 + 1

    device = opencl_device(device_id)
    close_to_torch(device, fn, x)
    graph = trace(fn, [x], get_backend("opencl").decompositions())
    # Only the reshape of the strided permutation needs a copy.
    assert len(lower(graph, device.target).launches) <= 2


def random_program(seed: int) -> Callable[..., list[torch.Tensor]]:
    """Return a random graph of elementwise operators, views, reductions and joins on (6, 20)."""

    def fn(*inputs: torch.Tensor) -> list[torch.Tensor]:
        choose = random.Random(seed)
        pool = list(inputs)
        for _ in range(14):
            a, b = choose.choice(pool), choose.choice(pool)
            kind = choose.randrange(9)
            if kind == 0:
                made = a * b
            elif kind == 1:
                made = torch.tanh(a + 0.5)
            elif kind == 2:
                made = a - b.mean(0, keepdim=True)
            elif kind == 3:
                made = a.t().contiguous().view(6, 20)
            elif kind == 4:
                made = torch.where(a > b, a, b * 0.5)
            elif kind == 5:
                made = torch.cat([b[:, 7:], a[:, :7]], 1)
            elif kind == 6:
                made = a / (1 + b.abs().sum(1, keepdim=True))
            elif kind == 7:
                made = torch.relu(a.flip(1))
            else:
                made = a.clamp(-1, 1).lerp(b, 0.25)
            pool.append(made)
        return [pool[-1], pool[-1].t(), pool[choose.randrange(2, len(pool))] + 0, pool[2]]

    return fn


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(device_id: str, seed: int) -> None:
    close_to_torch(opencl_device(device_id), random_program(seed), *tensors((6, 20), (6, 20)))


@pytest.mark.slow
def test_long_chains_are_cut(device_id: str) -> None:
    (x,) = tensors((50,))

    def fn(a: torch.Tensor) -> torch.Tensor:
        b = a
        for i in range(200):
            b = b * 0.9 + (a if i % 2 else b) * 0.1
        return b

    close_to_torch(opencl_device(device_id), fn, x)


@pytest.mark.slow
def test_an_adam_step_is_one_kernel_besides_scalars(device_id: str) -> None:
    shapes = [(9, 13)] * 4 + [()] * 2
    p, g, m, v, _, _ = tensors(*shapes)
    step, lr = torch.tensor(3.0), torch.tensor(1e-3)

    def fn(p, g, m, v, step, lr):  # type: ignore[no-untyped-def] # six tensors
        m = m.lerp(g, 0.1)
        v = v * 0.999 + g * g * 0.001
        scale = (1 - 0.999**step).sqrt()
        return p - lr / (1 - 0.9**step) * m / (v.sqrt() / scale + 1e-8), m, v

    inputs = (p, g, m, v.abs(), step, lr)
    device = opencl_device(device_id)
    close_to_torch(device, fn, *inputs, ulps=16)
    graph = trace(fn, inputs, get_backend("opencl").decompositions())
    big = [
        launch
        for launch in lower(graph, device.target).launches
        if any(getattr(arg, "shape", ()) == (9, 13) for arg in launch.args)
    ]
    assert len(big) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "batch_dim", "samples"),
    [((6, 5, 9), 0, 6), ((8, 7), 0, 4), ((3, 4, 11), 1, 4), ((37,), 0, 1), ((2, 5000), 0, 2)],
)
def test_keep_mask_draws_the_reference_numbers(
    device_id: str, size: tuple[int, ...], batch_dim: int, samples: int
) -> None:
    rng = torch.tensor([0x1234567_89ABCDEF, 77, 5])

    def fn(words: torch.Tensor) -> torch.Tensor:
        return keep_mask(words, 3, list(size), 0.7, batch_dim, samples)

    (found,) = results(opencl_device(device_id), fn, rng)
    np.testing.assert_array_equal(found, fn(rng).numpy())


@pytest.mark.slow
def test_integers_and_bools(device_id: str) -> None:
    a = torch.arange(-20, 20, dtype=torch.int64).view(2, 20)
    b = torch.tensor([[3, -4], [7, 2]], dtype=torch.int64).repeat(1, 10)
    close_to_torch(
        opencl_device(device_id),
        lambda a, b: (
            torch.div(a, b, rounding_mode="floor"), a.remainder(b), a.to(torch.bool),
            (a > b) & (b > 0),
            (a > 0).to(torch.float32) * 2, a.to(torch.int32) - 1, ~(a == b), a.clamp(min=-3, max=4),
        ),
        a,
        b,
    )  # fmt: skip


@pytest.mark.slow
def test_nan_and_infinity_are_kept(device_id: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -1.0] * 5)
    y = torch.zeros(25)

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(a), torch.maximum(a, b), torch.minimum(b, a), a.clamp(-2, 2), a.amax()

    for found, want in zip(results(opencl_device(device_id), fn, x, y), fn(x, y), strict=True):
        np.testing.assert_array_equal(found, want.numpy())


def test_an_index_out_of_range_is_reported(device_id: str) -> None:
    device = opencl_device(device_id)
    (table,) = tensors((4, 20))
    executable = compiled(device, torch.ops.aten.embedding, table, torch.tensor([1, 2, 3, 0]))
    buffers, events = upload(device, table, torch.tensor([1, 9, 3, -5]))
    (output,), event, _ = executable.run(buffers, after=events)
    with pytest.raises(BackendError, match="index -5 is out of range for size 4"):
        event.wait()
    rows = fetch(device, output)
    np.testing.assert_array_equal(rows[[0, 2]], table[[1, 3]].numpy())
    assert np.isnan(rows[[1, 3]]).all()
