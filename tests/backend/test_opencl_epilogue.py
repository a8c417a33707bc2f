"""Elementwise operators after a matrix product: right, in its kernel, and in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from found_devices import fetch, trace
from hetpipe.backends.opencl.lower.lowering import lower
from hetpipe.backends.opencl.platform.tuning import by_rules, cache_nbytes
from hetpipe.backends.opencl.run.memory import OpenCLBuffer
from oclgrind import ORACLE, log_of
from opencl_devices import close_to_torch, compiled, opencl_device, upload
from opencl_products import INTERPRETERS, OPENCL

from hetpipe.sdk.host.registry import get_backend

DEPTH_BLOCK = by_rules(16, cache_nbytes(2)).depth_block
on_every_device = pytest.mark.parametrize("device_id", OPENCL)
SIZES = [(24, 64, 48), (25, 33, 50), (13, 95, 31), (36, 16, 40), (50, 70, DEPTH_BLOCK + 29)]
"""Rows, columns and depth: whole tiles, every edge, and a depth of two blocks."""


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def kernels(device_id: str, fn: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """Return the launches of `fn` except packing; `matmul_` is a product with an epilogue."""
    graph = trace(fn, inputs, get_backend("opencl").decompositions())
    names = [each.kernel.name for each in lower(graph, opencl_device(device_id).target).launches]
    short = [name.split("_")[0] + "_" * ("_" in name) for name in names]
    return [name for name in short if name != "pack_"]


def check(
    device_id: str, fn: Callable[..., Any], *inputs: torch.Tensor, runs: list[str] | None
) -> None:
    """Check `fn` against float64, and its launches against `runs` (see `kernels`)."""
    close_to_torch(opencl_device(device_id), fn, *inputs, ulps=256)
    if runs is not None:
        assert kernels(device_id, fn, *inputs) == runs


def blocks(depth: int) -> list[str]:
    """Return the launches of a fused product; every block of depth but the last is a plain one."""
    return ["matmul"] * (-(-depth // DEPTH_BLOCK) - 1) + ["matmul_"]


@pytest.mark.wide
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_every_device
def test_residual_through_a_reshape(device_id: str, size: tuple[int, int, int]) -> None:
    m, n, k = size

    def fn(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + torch.addmm(b, a, w.t()).view(1, m, n)

    inputs = tensors((1, m, n), (m, k), (n, k), (n,))
    check(device_id, fn, *inputs, runs=blocks(k))


@pytest.mark.wide
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_every_device
def test_gelu_with_its_derivative(device_id: str, size: tuple[int, int, int]) -> None:
    m, n, k = size

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.linear(x, w, b)
        below = (torch.erf(h * 0.5**0.5) + 1) * 0.5
        return F.gelu(h), below + h * torch.exp(h * h * -0.5) * 0.3989422804014327

    inputs = tensors((2, m, k), (n, k), (n,))
    check(device_id, fn, inputs[0], inputs[1] / k**0.5, inputs[2], runs=blocks(k))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@on_every_device
def test_a_donated_accumulator_is_added_to_in_place(
    device_id: str, size: tuple[int, int, int]
) -> None:
    m, n, k = size

    def fn(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return total + torch.mm(a.t(), b)

    total, a, b = tensors((m, n), (k, m), (k, n))
    assert kernels(device_id, fn, total, a, b) == blocks(k)
    device = opencl_device(device_id)
    executable = compiled(device, fn, total, a, b)
    buffers, events = upload(device, total, a, b)
    assert isinstance(buffers[0], OpenCLBuffer)
    memory = buffers[0].memory
    for _ in range(3):
        (buffers[0],), event, _ = executable.run(buffers, donate=frozenset({0}), after=events)
        events = [event]
        assert isinstance(buffers[0], OpenCLBuffer)
        assert buffers[0].memory is memory
    want = total.double() + 3 * (a.double().t() @ b.double())
    found = torch.from_numpy(fetch(device, buffers[0], events))
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-6 * float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(13, 45, 40), (12, 32, DEPTH_BLOCK + 1)], ids=str)
@on_every_device
def test_batches(device_id: str, size: tuple[int, int, int]) -> None:
    m, n, k = size

    def fn(x: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.bmm(a, b) * 0.1).view(3, m, n) + x * v[:, None, :]

    check(device_id, fn, *tensors((3, m, n), (3, n), (3, m, k), (3, k, n)), runs=blocks(k))


@pytest.mark.slow
@on_every_device
def test_an_epilogue_may_read_other_tensors(device_id: str) -> None:
    """It may read a row, a column, a number, a transposed tensor, an indexed table, and indices."""

    def fn(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, row, column, number, crossed, table, index = given
        c = torch.mm(a, b)
        d = c * column + row / number - crossed.t()
        return d.view(5, 5, 40) + F.embedding(index, table)[:, None], c > row

    inputs = tensors((25, 30), (30, 40), (40,), (25, 1), (), (40, 25), (4, 40))
    index = torch.tensor([0, 3, 1, 1, 2])
    check(device_id, fn, *inputs, index, runs=None)
    assert kernels(device_id, fn, *inputs, index)[0] == "matmul_"


@pytest.mark.slow
@pytest.mark.parametrize("depth", [50, DEPTH_BLOCK + 29])
@on_every_device
def test_a_product_with_other_readers_is_stored(device_id: str, depth: int) -> None:
    a, b = tensors((25, depth), (depth, 45))
    check(device_id, lambda a, b: ((c := a @ b), torch.relu(c)), a, b, runs=blocks(depth))
    summed = [*blocks(depth), "fused_"]
    check(device_id, lambda a, b: (torch.relu(c := a @ b), c.sum(0)), a, b, runs=summed)
    check(device_id, lambda a, b: torch.relu(a @ b).sum(0), a, b, runs=None)


def test_a_product_only_the_epilogue_reads_is_not_stored() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = torch.tanh(a @ b)
        return torch.exp(c), torch.sin(c)

    graph = trace(fn, tensors((30, 40), (40, 50)), get_backend("opencl").decompositions())
    lowered = lower(graph, opencl_device(OPENCL[0]).target)
    touched = {key for launch in lowered.launches for key in launch.touches}
    rooms = 1
    assert len(touched) == len(lowered.inputs) + rooms + len(lowered.outputs)


@pytest.mark.slow
@on_every_device
def test_other_orders_are_not_fused(device_id: str) -> None:
    a, b, c = tensors((40, 30), (30, 40), (80, 20))
    apart = ["matmul", "fused_"]
    check(device_id, lambda a, b, c: (a @ b).t() * 2 + c.view(40, 40), a, b, c, runs=apart)
    check(device_id, lambda a, b, c: (d := a @ b) + d.t(), a, b, c, runs=apart)
    check(device_id, lambda a, b, c: (a @ b).view(80, 20) * c[0], a, b, c, runs=apart)
    check(device_id, lambda a, b, c: torch.cat([(a @ b) * 2, c.view(40, 40)]), a, b, c, runs=None)
    # These rows end with the product's rows, in two parts.
    check(device_id, lambda a, b, c: (a @ b).view(40, 2, 20) * 2, a, b, c, runs=["matmul_"])


@pytest.mark.slow
@on_every_device
def test_a_backward_fuses_both_gradients(device_id: str) -> None:
    """Between each product and its reader, the graph has other products and a sum."""

    def fn(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, bias_total, dy, slope, x, w = given
        dx = torch.mm(dy, w)
        dw = torch.mm(dy.t(), x)
        summed = bias_total + dy.sum(0)
        return total + dw.t().t(), summed, dx.view(2, 15, 40) * slope

    inputs = tensors((50, 40), (50,), (30, 50), (2, 15, 40), (30, 40), (50, 40))
    found = kernels(device_id, fn, *inputs)
    assert found.count("matmul_") == 2
    assert "matmul" not in found
    check(device_id, fn, *inputs, runs=None)


@pytest.mark.slow
@on_every_device
def test_a_chain_of_products_stays_in_order(device_id: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        products = [a @ b]
        for _ in range(5):
            products.append(torch.tanh(products[-1] @ b * 0.1) + products[-1])
        return [products[-1], products[0] - products[3]]

    check(device_id, fn, *tensors((30, 40), (40, 40)), runs=None)


def test_a_result_may_replace_an_input_of_the_epilogue() -> None:
    """A result may not replace operands or tensors that are read in another order."""
    device = opencl_device(OPENCL[0])

    def fn(*given: torch.Tensor) -> torch.Tensor:
        x, row, y, a, b = given
        return torch.addmm(row, a, b) * x + y.t()

    graph = trace(fn, tensors((30, 30), (30, 30), (30, 30), (30, 30), (30, 30)), {})
    lowered = lower(graph, device.target)
    assert set(lowered.outputs[0].heirs) == {0}


def random_program(seed: int) -> Callable[..., list[torch.Tensor]]:
    """Return a random graph of products, elementwise operators, views and sums on (36, 36)."""

    def fn(*inputs: torch.Tensor) -> list[torch.Tensor]:
        choose = random.Random(seed)
        pool = list(inputs)
        for _ in range(16):
            a, b = choose.choice(pool), choose.choice(pool)
            kind = choose.randrange(8)
            if kind < 3:
                made = torch.addmm(b[0], a, b.t() if kind else b) / 36
            elif kind == 3:
                made = torch.tanh(a.view(4, 9, 36) + b[:9]).view(36, 36)
            elif kind == 4:
                made = a * b.t()
            elif kind == 5:
                made = a + b * 0.5
            elif kind == 6:
                made = a - b.mean(1, keepdim=True)
            else:
                made = torch.relu(pool[-1]) + pool[-1]
            pool.append(made)
        return [pool[-1], pool[-2].t(), pool[choose.randrange(2, len(pool))] + 0]

    return fn


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(6))
@on_every_device
def test_random_graphs(device_id: str, seed: int) -> None:
    check(device_id, random_program(seed), *tensors((36, 36), (36, 36)), runs=None)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_with_donated_inputs(seed: int) -> None:
    device, fn = opencl_device(OPENCL[0]), random_program(seed)
    inputs = tensors((36, 36), (36, 36))
    buffers, events = upload(device, *inputs)
    executable = compiled(device, fn, *inputs)
    outputs, event, _ = executable.run(buffers, donate=frozenset({0, 1}), after=events)
    for buffer, want in zip(outputs, fn(*(x.double() for x in inputs)), strict=True):
        found = torch.from_numpy(fetch(device, buffer, [event])).double()
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(found, want, rtol=0, atol=3e-5 * scale)


GRAPHS = """
import torch
from opencl_devices import close_to_torch, opencl_device
device = opencl_device(ORACLE)
def x(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(1))
close_to_torch(device, lambda c, a, b: c + torch.relu(a @ b).view(1, 13, 33), x(1, 13, 33), x(13, 40), x(40, 33))
close_to_torch(device, lambda v, a, b: ((a @ b) * v, a @ b), x(35), x(2, 13, 40), x(2, 40, 35))
close_to_torch(device, lambda c, a, b: c + a @ b, x(4, 40), x(4, 1100), x(1100, 40))
"""  # noqa: E501 - one graph a line


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_no_access_outside_a_tensor(tmp_path: Path) -> None:
    assert INTERPRETERS
    assert log_of(GRAPHS, tmp_path, "OCLGRIND_DATA_RACES") == ""
