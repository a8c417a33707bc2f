"""Indices out of range are refused by every backend, as by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from found_devices import Array, execute, infos, opened, trace

from hetpipe.capture import capture
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device, Executable
from hetpipe.sdk.graph import dump_graph, graph_calls, graph_inputs, load_graph
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.indices import index_bounds

aten = torch.ops.aten
DEVICES = [info.id for info in infos()]
X = torch.arange(20.0).reshape(4, 5)
SCORES = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def nll_and_gradient(x: torch.Tensor, target: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(x, target)
        return loss.detach(), *torch.autograd.grad(loss, [x])


def results(
    executable: Executable, device: Device, x: torch.Tensor, index: list[int]
) -> list[Array]:
    return execute(device, executable, [x.numpy(), np.array(index)])


# (indexed tensor, legal indices, function of both, size, whether negative indices are legal)
CASES: dict[str, tuple[torch.Tensor, list[int], Callable[..., Any], int, bool]] = {
    "embedding": (X, [0, 3], lambda x, i: F.embedding(i, x), 4, False),
    "embedding_2d": (X, [0, 3], lambda x, i: F.embedding(i.expand(3, 2), x) * 2, 4, False),
    "embedding_int32": (X, [0, 3], lambda x, i: F.embedding(i.int(), x), 4, False),
    "index_select": (X, [0, 4], lambda x, i: x.index_select(1, i), 5, False),
    "gather": (X, [0, 4], lambda x, i: x.gather(1, i.expand(3, 2)), 5, False),
    "scatter": (X, [0, 4], lambda x, i: aten.scatter.value(x, 1, i.expand(3, 2), 2.0), 5, False),
    "scatter_add": (X, [0, 4], lambda x, i: x.scatter_add(1, i.expand(3, 2), x), 5, False),
    "cross_entropy": (SCORES, [1, 0, -100, 4], nll_and_gradient, 5, False),
    "computed": (X, [0, 3], lambda x, i: F.embedding(2 * i - i, x), 4, False),
    "index": (X, [0, -4], lambda x, i: x[i], 4, True),
    "index_second": (X, [0, -5], lambda x, i: x[:, i] * 2, 5, True),
    "index_pair": (X, [0, -4], lambda x, i: x[i, i], 4, True),
    "index_put": (X, [0, -4], lambda x, i: aten.index_put(x, [i], x[:2], True), 4, True),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device_id", DEVICES)
def test_legal_indices_are_accepted_and_others_refused(device_id: str, case: str) -> None:
    x, legal, fn, size, negatives = CASES[case]
    device = opened(device_id)
    graph = trace(fn, [x, torch.tensor(legal)], get_backend(device.info.backend).decompositions())
    if any(device.supports(node) is not None for node in graph_calls(graph)):
        pytest.skip("the device refuses the operator when planning")
    executable = device.compile(graph)
    expected = fn(x, torch.tensor(legal))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for array, tensor in zip(results(executable, device, x, legal), expected, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-5, atol=1e-6)
    for bad in (size, -size - 1 if negatives else -1):
        message = (
            rf"{device_id}: aten\.\S+ of layer \?: index {bad} is out of range for size {size}"
        )
        with pytest.raises(BackendError, match=message):
            results(executable, device, x, [*legal[:-1], bad])


@pytest.mark.parametrize("device_id", DEVICES)
def test_a_refused_run_leaves_the_executable_usable(device_id: str) -> None:
    device = opened(device_id)
    table = get_backend(device.info.backend).decompositions()
    graph = trace(lambda x, i: F.embedding(i, x), [X, torch.ones(2).long()], table)
    executable = device.compile(graph)
    with pytest.raises(BackendError, match="index 9 is out of range for size 4"):
        results(executable, device, X, [1, 9])
    (rows,) = results(executable, device, X, [1, 3])
    np.testing.assert_array_equal(rows, X.numpy()[[1, 3]])


@pytest.mark.parametrize("device_id", [i for i in DEVICES if i.startswith("opencl")])
def test_a_graph_with_constant_indices_has_no_check(device_id: str) -> None:
    """A lookup with constant indices costs nothing more."""
    device = opened(device_id)
    table = get_backend("opencl").decompositions()
    graph = trace(lambda x: F.embedding(torch.arange(3), x), [X], table)
    executable: Any = device.compile(graph)
    assert executable._lowered.checks == ()


def test_indices_checked_by_the_caller_are_not_checked_again() -> None:
    graph = trace(lambda x, i: F.embedding(i.expand(3, 2), x), [X, torch.tensor([0, 3])], {})
    lookup = next(node for node in graph_calls(graph) if "embedding" in str(node.target))

    def bounds(checked: tuple[int, int, int | None]) -> int:
        graph_inputs(graph)[1].meta["checked"] = checked
        copy = load_graph(dump_graph(graph))
        assert graph_inputs(copy)[1].meta["checked"] == checked
        return len(index_bounds(lookup))

    assert bounds((0, 4, None)) == bounds((1, 3, None)) == 0
    assert bounds((0, 5, None)) == bounds((-1, 4, None)) == bounds((0, 4, -100)) == 1


def test_a_stage_does_not_check_its_batch_again() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 5))
    example = torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    captured = capture(model, F.cross_entropy, example)
    stages = captured.stage_graphs([1], [{}, {}], [2], None)
    programs = [p for stage in stages for p in stage.passes[2].programs]
    calls = [node for program in programs for node in graph_calls(program.graph)]
    names = {str(node.target) for node in calls}
    assert {"aten.embedding.default", "aten.nll_loss_forward.default"} <= names
    assert not [bound for node in calls for bound in index_bounds(node)]
