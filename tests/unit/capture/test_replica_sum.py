"""Sums over replicas: batch norm with them, their gradient, and programs divided at them."""

from __future__ import annotations

from functools import partial
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from found_devices import fetch, put
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture import Captured
from hetpipe.capture.export.decompositions import batch_norm, batch_norm_without_memory
from hetpipe.capture.program import CUT, GRAD, PARAM, Program, Slot
from hetpipe.sdk.graph import canonical, core_decompositions, operator_name
from hetpipe.sdk.host.registry import get_backend, open_device
from hetpipe.sdk.operators.replicas import replica_sum
from hetpipe.wire.wire import Array
from hetpipe.worker.divided import compile_programs

aten = torch.ops.aten
SUM = "hetpipe.replica_sum.default"


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (3, 4, 5, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check values far from zero too, where a difference of mean squares would lose all digits."""
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=dtype) + 300.0).requires_grad_()
    weight, bias = (torch.randn(4, dtype=dtype, requires_grad=True) for _ in range(2))
    running = torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype)
    found = batch_norm(x, weight, bias, *running, True, 0.3, 1e-5)
    wanted = aten._native_batch_norm_legit_functional(
        x, weight, bias, *running, True, 0.3, 1e-5
    )  # fmt: skip
    close = partial(torch.testing.assert_close, rtol=3e-4, atol=3e-4)
    if dtype == torch.float64:
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    tangent = torch.randn(shape, dtype=dtype)
    of = [x, weight, bias]
    for mine, theirs in zip(
        torch.autograd.grad(found[0], of, tangent),
        torch.autograd.grad(wanted[0], of, tangent),
        strict=True,
    ):
        close(mine, theirs)
    for mine, theirs in zip(
        batch_norm_without_memory(x, None, None, True, 0.3, 1e-5),
        aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.3, 1e-5),
        strict=True,
    ):
        close(mine, theirs)


def test_the_gradient_is_the_sum_of_the_gradients() -> None:
    def gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        loss = (replica_sum(x * w) ** 2).sum()
        return torch.autograd.grad(loss, w)[0]

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    traced = make_fx(gradient)(x, w)
    assert [operator_name(node) for node in traced.graph.nodes].count(SUM) == 2
    torch.testing.assert_close(gradient(x, w), 2 * x * x * w.detach())
    torch.library.opcheck(replica_sum, (w,))


class Norms(nn.Module):
    """Norms over samples, over each sample alone, and over weights, which all replicas share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 5)
        self.batch, self.instance = nn.BatchNorm2d(4), nn.InstanceNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.first.weight.view(1, 4, -1), None, None, training=True)
        x = F.conv2d(x, weight.view_as(self.first.weight))
        return self.last(self.instance(self.batch(x)).relu().mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "inputs", "min-cut"])
def test_only_divided_tensors_are_summed_and_only_once(recompute: str) -> None:
    """The backward repeats no exchange, even when it repeats other operators."""
    example = (torch.randn(6, 1, 6, 6), torch.arange(6) % 5)
    counts = []
    for sync in (True, False):
        captured = Captured(Norms(), F.cross_entropy, example, sync_batch_norm=sync)
        (stage,) = captured.stage_graphs([], [core_decompositions()], [6], None, [recompute])
        for program in (stage.passes[6].forward, stage.passes[6].backward):
            assert program is not None
            names = [operator_name(node) for node in program.graph.graph.nodes]
            counts.append(names.count(SUM))
    assert counts == [2, 2, 0, 0]


def program_of(function: Any, slots: list[Slot], outputs: int) -> Program:
    table = dict(get_backend("numpy").decompositions())
    graph = make_fx(function, table)(*(torch.zeros(slot.shape) for slot in slots))
    found = tuple(Slot("saved", str(n), (), "float32") for n in range(outputs))
    return Program(canonical(graph), tuple(slots), found)


def test_a_divided_program() -> None:
    """Divide a program whose outputs include inputs and sums.

    A later part reads a view and a tensor of an earlier part, two sums are exchanged together,
    and the caller donates an accumulator.
    """
    slots = [
        Slot(CUT, "x", (2, 3), "float32"), Slot(PARAM, "w", (3, 3), "float32"),
        Slot(GRAD, "g", (3,), "float32"),
    ]  # fmt: skip

    def function(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w.t()
        total, count = replica_sum(y.sum(0)), replica_sum(torch.full((1,), 1.0))
        given = replica_sum(x)
        centred = y - total / count
        squares = replica_sum((centred * centred).sum(0))
        return x, g + squares, total, given, centred.t() @ w.view(3, 3)[:2] * squares, given * 0.5

    program = program_of(function, slots, 6)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((2, *slot.shape)).astype(np.float32) for slot in slots]
    values[1][1] = values[1][0]
    barrier, exchanged = Barrier(2), list[int]()
    terms: dict[int, list[Array]] = {}
    found: dict[int, list[Array]] = {}

    def meet(replica: int, own: list[Array]) -> list[Array]:
        terms[replica] = own
        barrier.wait(10)
        sums = [one + other for one, other in zip(terms[0], terms[1], strict=True)]
        barrier.wait(10)
        exchanged.append(len(own))
        return sums

    def replica(number: int) -> None:
        device = open_device("numpy:cpu:0")
        executable = compile_programs(device, [program], partial(meet, number))[0]
        inputs = [put(device, value[number]) for value in values]
        outputs, event, chunks = executable.run(inputs, frozenset({2}))
        assert outputs[0] is inputs[0]
        assert not chunks
        found[number] = [fetch(device, output, [event]) for output in outputs]

    threads = [Thread(target=replica, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(exchanged) == [1, 1, 3, 3]
    x, w, g = values
    y = x @ w[0].T
    centred = y - y.sum((0, 1)) / 2
    squares = (centred**2).sum((0, 1))
    for n in range(2):
        wanted = [
            x[n], g[n] + squares, y.sum((0, 1)), x.sum(0), centred[n].T @ w[0][:2] * squares,
            x.sum(0) * 0.5,
        ]  # fmt: skip
        for mine, theirs in zip(found[n], wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
