"""Operators in their form for graphics cards, in the cases of the tests of other families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_opencl_further as further
import test_opencl_loss as losses
import test_opencl_normalization as norms
import test_opencl_pooling as pools
import torch
from found_devices import infos
from oclgrind import ORACLE, log_of
from opencl_devices import close_to_torch, compiled, opencl_device, results
from test_opencl_gpu_form import as_gpu, normal

DEVICES = [
    info.id
    for info in infos()
    if info.backend == "opencl" and info.kind == "cpu" and not info.capabilities.reference
]
aten = torch.ops.aten


@pytest.fixture(params=DEVICES)
def card(request: pytest.FixtureRequest) -> str:
    """Return the id of a device that counts as a graphics card."""
    return as_gpu(request.param).info.id


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", norms.BATCH, ids=str)
def test_batch_norm(card: str, shape: tuple[int, ...], training: bool) -> None:
    norms.test_batch_norm(card, shape, training)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        norms.test_batch_norm_backward(card, shape, training, mask)


@pytest.mark.slow
def test_batch_norm_without_weights_and_with_a_large_mean(card: str) -> None:
    norms.test_batch_norm_without_weights_or_statistics(card)
    norms.test_variance_survives_a_large_mean(card)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dims"), [*norms.LAYER, ((3, 1500), 1)], ids=str)
def test_layer_norm(card: str, shape: tuple[int, ...], dims: int) -> None:
    norms.test_layer_norm(card, shape, dims)


@pytest.mark.slow
@pytest.mark.parametrize("pair", losses.PAIRS, ids=["softmax", "log_softmax"])
def test_softmax(card: str, pair: tuple[Any, Any]) -> None:
    for shape, dim in [*losses.SOFTMAX, ((2, 1500), 1)]:
        losses.test_softmax(card, shape, dim, pair)
    losses.test_softmax_of_large_and_masked_scores(card)


@pytest.mark.slow
@pytest.mark.parametrize("shape", losses.SCORES, ids=str)
def test_likelihood(card: str, shape: tuple[int, ...]) -> None:
    for reduction in range(3):
        for weighted in (True, False):
            losses.test_nll(card, shape, reduction, weighted)


def test_a_class_that_does_not_exist(card: str) -> None:
    losses.test_a_class_that_does_not_exist_is_refused(card)


@pytest.mark.slow
@pytest.mark.parametrize("name", pools.POOLS)
def test_pooling(card: str, name: str) -> None:
    pools.test_max_pool(card, name)
    for divisor, include in ((None, True), (None, False), (5, True)):
        pools.test_avg_pool(card, name, include, divisor)
    pools.test_max_pool_returns_the_first_maximum_and_nan(card)


@pytest.mark.slow
def test_adaptive_pooling(card: str) -> None:
    for size in ((1, 1), (3, 2), (7, 5), (10, 13)):
        pools.test_adaptive_avg_pool(card, size)


@pytest.mark.slow
def test_scatter_and_index_put(card: str) -> None:
    for name in ("the last stays", "columns", "with a gap, added", "nothing"):
        further.test_index_put(card, name)
    for name in further.SCATTERS:
        further.test_scatters(card, name, torch.float32)
    further.test_scatters(card, "overwrite", torch.int64)


@pytest.mark.slow
def test_rows_of_a_table_get_their_sums_in_order(card: str) -> None:
    """Sources of one row are many, so another order would give other bits."""
    index = torch.arange(500) * 7 % 300 % 11
    gradient = normal(500, 40)

    def fn(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return aten.embedding_dense_backward(g, i, 13, 3, False)

    expected = torch.zeros(13, 40)
    for row, at in zip(gradient, index.tolist(), strict=True):
        expected[at] += row * (at != 3)
    (found,) = results(opencl_device(card), fn, gradient, index)
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "count"), [(3, 200), (1200, 9)])
def test_sources_of_few_and_of_many_lines(card: str, lines: int, count: int) -> None:
    index = torch.arange(count * lines).reshape(count, lines) * 5 % 17 % 6 - 2
    index = torch.where(index < 0, index + 6, index)

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(0, i, s)

    device, inputs = opencl_device(card), (normal(6, lines), index, normal(count, lines))
    names = [launch.kernel.name for launch in compiled(device, fn, *inputs)._lowered.launches]
    assert ("put_columns" if lines > 1000 else "sort_sources") in names
    close_to_torch(device, fn, *inputs)


CHECKED = """
import torch
from as_gpu import AsGpu
from dataclasses import replace
from opencl_devices import close_to_torch
backend, aten = AsGpu(), torch.ops.aten
device = backend.open(next(info for info in backend.discover() if "oclgrind" in info.id))
device.target = replace(device.target, compute_units=8)
def x(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(1))
def rows(x, w, b):
    y, mean, rstd = aten.native_layer_norm(x, [70], w, b, 1e-5)
    dx = aten.native_layer_norm_backward(y, x, [70], mean, rstd, w, b, [True, True, True])
    p = aten._softmax(x, 1, False)
    return y, *dx, p, aten._softmax_backward_data(y, p, 1, x.dtype)
def likelihood(x, target):
    p = aten._log_softmax(x, 1, False)
    loss, total = aten.nll_loss_forward(p, target, None, 1, -100)
    dp = aten.nll_loss_backward(loss, p, target, None, 1, -100, total)
    return loss, aten._log_softmax_backward_data(dp, p, 1, x.dtype)
def images(x, w, b):
    y, mean, rstd = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    dx = aten.native_batch_norm_backward(
        y, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True]
    )
    m, at = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    back = aten.max_pool2d_with_indices_backward(
        m, x, [3, 3], [2, 2], [1, 1], [1, 1], False, at
    )
    a = aten._adaptive_avg_pool2d(x, [3, 2])
    return y, *dx, m, back, aten._adaptive_avg_pool2d_backward(a, x)
def table(g, i): return aten.embedding_dense_backward(g, i, 6, 3, False)
close_to_torch(device, lambda x: (x.sum(0), x.sum(1), x.sum(), x.amax((0, 2))), x(9, 40, 6))
close_to_torch(device, rows, x(3, 70), x(70), x(70))
close_to_torch(device, likelihood, x(5, 9), torch.tensor([1, 0, 8, -100, 3]))
close_to_torch(device, images, x(2, 3, 5, 7), x(3), x(3))
close_to_torch(device, table, x(90, 5), torch.arange(90) * 7 % 5)
close_to_torch(device, lambda x, i: x.scatter_add(0, i, x), x(3, 900), torch.ones(3, 900).long())
"""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_no_races_and_no_access_outside(tmp_path: Path) -> None:
    assert log_of(CHECKED, tmp_path, "OCLGRIND_DATA_RACES") == ""
