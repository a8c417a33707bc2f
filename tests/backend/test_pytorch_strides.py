"""Kernels of torch read strided operands correctly.

Every operator call in torch's operator database, gradients included, is repeated with each operand
in other layouts, unless the backend makes the operands of that operator row-major.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any
from zlib import crc32

import pytest
import torch
from found_devices import opened, run, trace
from hetpipe.backends.pytorch.memory import reads_strides
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hetpipe.conformance.database import entries

PARTS = 16
SAMPLES = 2
pytestmark = pytest.mark.filterwarnings("ignore")  # some samples are odd on purpose


def layouts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the same values transposed in memory, with channels last, and with gaps."""
    dims = range(tensor.ndim)
    for order in ([*reversed(dims)], [0, *range(2, tensor.ndim), 1]):
        if tensor.ndim > 1:
            back = [order.index(dim) for dim in dims]
            yield tensor.permute(order).contiguous().permute(back)
    yield torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def largest_of(tensors: list[torch.Tensor]) -> float:
    """Return the largest finite magnitude."""
    floats = [t[t.isfinite()].abs() for t in tensors if t.is_floating_point()]
    return max((float(t.max()) for t in floats if t.numel()), default=0.0)


def is_near(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> bool:
    """Return whether both are equal up to rounding at this scale, as in sums that cancel."""
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    finite = expected.isfinite()
    error = (actual[finite] - expected[finite]).abs().nan_to_num(nan=torch.inf)
    limit = 80 * torch.finfo(expected.dtype).eps * max(scale, largest_of([expected]))
    return actual.shape == expected.shape and bool((error <= limit).all())


class Again(TorchDispatchMode):
    """Repeats each call of an operator that reads strides; `wrong` names the wrong operators."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self.asked: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        if self._counts(func, leaves):
            self._repeat(func, leaves, spec)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _counts(func: Any, leaves: list[Any]) -> bool:
        schema = func._schema
        views = any(result.alias_info is not None for result in schema.returns)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        dense = all(t.layout is torch.strided and not t.is_complex() for t in tensors)
        uninitialised = "empty" in schema.name
        return bool(
            tensors and dense and reads_strides(func) and not schema.is_mutable
            and not (views or random or uninitialised)
        )  # fmt: skip

    def _repeat(self, func: Any, leaves: list[Any], spec: Any) -> None:
        def results(given: list[Any]) -> list[torch.Tensor]:
            args, kwargs = tree_unflatten(given, spec)
            return tensors_in(func(*args, **kwargs))

        given = [x.detach().contiguous() if isinstance(x, torch.Tensor) else x for x in leaves]
        try:
            expected = results(given)
        except Exception:  # a sample that torch refuses
            return
        self.asked.add(str(func))
        for place, leaf in enumerate(given):
            for other in layouts(leaf) if isinstance(leaf, torch.Tensor) else ():
                try:
                    found = results([*given[:place], other, *given[place + 1 :]])
                except Exception as error:
                    self.wrong[str(func)] = f"raises {error}"
                    continue
                scale = largest_of(tensors_in(given))
                if not all(is_near(*pair, scale) for pair in zip(found, expected, strict=True)):
                    shapes = [tuple(t.shape) for t in tensors_in(given)]
                    self.wrong[str(func)] = f"wrong for tensors {shapes}, tensor {place} strided"


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_read_strides_correctly(part: int, dtype: torch.dtype) -> None:
    again = Again()
    for name, entry in entries().items():
        if crc32(name.encode()) % PARTS != part:
            continue
        torch.manual_seed(0)
        samples = entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd)
        for sample in islice(samples, SAMPLES):
            try:
                with again:
                    results = tensors_in(entry.op(sample.input, *sample.args, **sample.kwargs))
                    squares = [(y * y).sum() for y in results if y.requires_grad]
                    inputs = tensors_in((sample.input, sample.args, sample.kwargs))
                    wanted = [x for x in inputs if x.requires_grad]
                    if squares and wanted:
                        torch.autograd.grad(squares, wanted, allow_unused=True)
            except Exception:  # a sample that torch refuses
                continue
    assert again.wrong == {}
    assert len(again.asked) > 10


def test_kernels_that_ignore_strides_are_listed() -> None:
    aten = torch.ops.aten
    assert not reads_strides(aten.native_group_norm.default)
    assert not reads_strides(aten.native_group_norm_backward.default)
    assert not reads_strides(aten._weight_norm_interface_backward.default)
    assert reads_strides(aten.mm.default)


def test_a_view_as_complex_of_a_transposed_tensor() -> None:
    """torch can view a tensor as complex only if its last dimension has no gaps."""
    device = opened("pytorch:cpu:0")
    x = torch.randn(2, 3, 5)
    graph = trace(
        lambda x: torch.view_as_real(torch.view_as_complex(x.transpose(0, 2).contiguous()) ** 2),
        [x],
        {},
    )
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.clone.default:  # as a capture drops it
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    (found,) = run(device, graph, [x.numpy()])
    a, b = x.transpose(0, 2).unbind(-1)
    torch.testing.assert_close(torch.from_numpy(found), torch.stack([a * a - b * b, 2 * a * b], -1))
