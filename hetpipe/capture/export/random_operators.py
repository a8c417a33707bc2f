"""Notices random operators, and replaces them in graphs by operators with an explicit counter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hetpipe.sdk.operators.random  # noqa: F401 - registers the operators
from hetpipe.capture.export.unsupported import where
from hetpipe.capture.slots import placeholders
from hetpipe.errors import CaptureError

aten = torch.ops.aten
own = torch.ops.hetpipe


class _Site:
    """A random call of the graph; methods insert the nodes that replace it."""

    def __init__(self, node: fx.Node, rng: fx.Node, site: int, samples: int) -> None:
        self.node, self._rng, self._site, self._samples = node, rng, site, samples
        self.args: tuple[Any, ...] = node.args
        self.value: Any = node.meta["val"]
        self._graph = node.graph

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call that has the metadata of the replaced node, except for the value."""
        node = self._graph.call_function(target, args, kwargs)
        fakes, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _fake_mode(self._graph):
            value = target(*fakes, **fake_kwargs)
        node.meta.update(self.node.meta, val=value)
        return node

    def mask(self, size: Sequence[int], keep: float) -> fx.Node:
        dim = self._batch_dim(size)
        return self.emit(
            own.keep_mask.default, self._rng, self._site, list(size), keep, dim, self._samples
        )

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.emit(aten._to_copy.default, node, dtype=dtype)

    def uniform(self, *more: int) -> fx.Node:
        """Draw uniform numbers in the result's shape and dtype, plus `more` dimensions."""
        size = [*self.value.shape, *more]
        dim = self._batch_dim(size)
        drawn = self.emit(own.uniform.default, self._rng, self._site, size, dim, self._samples)
        return self.cast(drawn, self.value.dtype)

    def normal(self) -> fx.Node:
        """Draw normal numbers by Box-Muller, from pairs in an extra last dimension."""
        pair = self.uniform(2)
        radius = self.emit(aten.select.int, pair, -1, 0)
        angle = self.emit(aten.mul.Tensor, self.emit(aten.select.int, pair, -1, 1), 2 * math.pi)
        log = self.emit(aten.log1p.default, self.emit(aten.neg.default, radius))
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Tensor, log, -2.0))
        return self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, angle))

    def _batch_dim(self, size: Sequence[int]) -> int:
        for dim, extent in enumerate(size):
            if extent % self._samples == 0 and extent > 0:
                return dim
        raise CaptureError(
            f"{self.node.target}{where(self.node)} draws the shape {tuple(size)}, but "
            f"no dimension is a multiple of the {self._samples} samples; draw one "
            "number per sample"
        )


def make_explicit(graph: fx.Graph, samples: int) -> fx.Node | None:
    """Replace all random operators; return the new placeholder of the counter, or None.

    Raises `CaptureError` for a random operator that has no replacement.
    """
    random_nodes = [node for node in graph.nodes if _is_random(node)]
    if not random_nodes:
        return None
    last = placeholders(graph)[-1]
    with graph.inserting_after(last):
        rng = graph.placeholder("rng")
    with _fake_mode(graph):
        rng.meta["val"] = torch.empty(3, dtype=torch.int64)
    for index, node in enumerate(random_nodes):
        if node.target not in _REPLACEMENTS:
            raise CaptureError(
                f"{node.target}{where(node)} is random and has no reproducible form here; use "
                "dropout, bernoulli, rand or randn, or pass the numbers in with the batch"
            )
        with graph.inserting_before(node):
            drawn = _REPLACEMENTS[node.target](_Site(node, rng, index, samples))
        if drawn is not None:
            node.replace_all_uses_with(drawn)
        graph.erase_node(node)
    return rng


def _is_random(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target in _DROPOUT_ARGUMENT:  # tagged only because of its dropout, which may be 0
        return bool(node.args[5])
    return True


_DROPOUT_ARGUMENT = frozenset(
    {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _dropout(site: _Site) -> None:
    x, p, train = site.args
    value, _ = site.value
    kept: Any = x
    mask: Any = None
    if train is not False and p > 0:
        mask = site.mask(value.shape, 1.0 - p)
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        factor = site.emit(aten.mul.Tensor, site.cast(mask, value.dtype), scale)
        kept = site.emit(aten.mul.Tensor, x, factor)
    for user in list(site.node.users):
        user.replace_all_uses_with(mask if user.args[1] == 1 else kept)
        site.node.graph.erase_node(user)


def _bernoulli_p(site: _Site) -> fx.Node:
    return site.cast(site.mask(site.value.shape, site.args[1]), site.value.dtype)


def _bernoulli(site: _Site) -> fx.Node:
    return site.cast(site.emit(aten.lt.Tensor, site.uniform(), site.args[0]), site.value.dtype)


def _scaled(site: _Site, drawn: fx.Node, last_is_end: bool) -> fx.Node:
    """Apply arguments 1 and 2: a shift (by default 0), and a factor or an end (by default 1)."""
    arguments = dict(enumerate(site.args))
    shift, last = arguments.get(1, 0.0), arguments.get(2, 1.0)
    scaled = site.emit(aten.mul.Tensor, drawn, last - shift if last_is_end else last)
    return site.emit(aten.add.Tensor, scaled, shift)


_REPLACEMENTS: dict[Any, Callable[[_Site], fx.Node | None]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.default: _bernoulli,
    aten.rand.default: _Site.uniform,
    aten.rand_like.default: _Site.uniform,
    aten.randn.default: _Site.normal,
    aten.randn_like.default: _Site.normal,
    aten.uniform.default: lambda site: _scaled(site, site.uniform(), last_is_end=True),
    aten.normal_functional.default: lambda site: _scaled(site, site.normal(), last_is_end=False),
}
"""For each operator, a function that returns the replacement of its result; None if the function
has already replaced the results."""


class DrawWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in `seen` that an operator has drawn random numbers."""

    supports_higher_order_operators = True
    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))
