"""Multiplies an embedding's table, not the row of each token, if tokens outnumber the rows.

A row E[i] of a table times a matrix W is row i of E W. So the whole table is multiplied, and the
rows of the product E W are looked up. Let G be the gradient of the looked-up rows, and S the sums
of G over equal tokens. Then the gradient of W is E^T S instead of E[i]^T G, and the gradient of E
is S W^T. So a multiplication is needed for each row of the table, not for each token. Sums have the
same terms in another order. If a backward has another version of the weights than its forward, the
rewritten backward uses the backward's version of both E and W.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_ROWS, _SUMS = aten.embedding.default, aten.embedding_dense_backward.default
_MM, _ADDMM = aten.mm.default, aten.addmm.default
_PERMUTE, _VIEWS = aten.permute.default, (aten.view.default, aten._unsafe_view.default)
_LEAST_GAIN = 2
"""Least tokens of a micro-batch per row of the table; with fewer, products stay unchanged."""


def multiply_tables(graph: fx.Graph, decomposed: Container[Any]) -> None:
    """Rewrite the products with rows of embeddings, and the products in their gradients.

    `decomposed` are operators that the graph must not contain.
    """
    for rows in graph.find_nodes(op="call_function", target=_ROWS):
        table, tokens = rows.args[:2]
        plain = rows.args[2:3] in ((), (-1,)) and not any(rows.args[3:])
        gain = tokens.meta["val"].numel() / max(1, len(table.meta["val"]))
        if plain and gain >= _LEAST_GAIN:
            _Table(graph, rows, _SUMS not in decomposed).rewrite()
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _ReorderedRows:
    """The rows of `base` in the order that the views `steps` produce.

    A row is a vector along the last dimension.
    """

    base: fx.Node
    steps: tuple[fx.Node, ...]

    def order(self) -> torch.Tensor:
        """Return, for each row, its number in the base."""
        shape = self.base.meta["val"].shape[:-1]
        order = torch.arange(shape.numel()).reshape(shape)
        for step in self.steps:
            order = step.target(order.contiguous(), _without_columns(step))  # type: ignore[operator]
        return order.reshape(-1)


def _trace_rows(node: fx.Node) -> _ReorderedRows:
    steps = []
    while _moves_rows(node):
        steps.append(node)
        node = node.all_input_nodes[0]
    return _ReorderedRows(node, tuple(reversed(steps)))


def _moves_rows(node: fx.Node) -> bool:
    if node.target is _PERMUTE:
        dims: Any = node.args[1]
        return bool(dims[-1] in (-1, len(dims) - 1))
    if node.target in _VIEWS:
        columns = node.all_input_nodes[0].meta["val"].shape[-1:]
        return bool(columns == node.meta["val"].shape[-1:] != (0,))
    return False


def _without_columns(step: fx.Node) -> list[int]:
    """Return the second argument of a view or permutation without the last dimension."""
    sizes = step.meta["val"].shape
    if step.target in _VIEWS:
        return list(sizes[:-1])
    dims: Any = step.args[1]
    return [dim % len(sizes) for dim in dims[:-1]]


class _Table:
    """One embedding, and the nodes made for it."""

    def __init__(self, graph: fx.Graph, rows: fx.Node, sums: bool) -> None:
        """`rows` calls the embedding; with `sums` the graph may sum rows of equal tokens."""
        self._graph, self._rows, self._may_sum = graph, rows, sums
        self._table: Any = rows.args[0]
        self._tokens: Any = rows.args[1]
        self._ordered: dict[bytes, fx.Node] = {}  # flattened tokens, by their order
        self._sums: dict[tuple[fx.Node, bytes], fx.Node] = {}

    def rewrite(self) -> None:
        """Replace the products."""
        for node in list(self._graph.nodes):
            with self._graph.inserting_before(node):
                replacement = self._replacement(node)
            if replacement is not None:
                node.replace_all_uses_with(replacement)

    def _replacement(self, node: fx.Node) -> fx.Node | None:
        if node.target in (_MM, _ADDMM):
            *bias, left, right = node.args
            if (rows := self._table_rows(left)) is not None:
                return self._product(node, bias, rows, right)
            if node.target is _MM and self._may_sum:
                return self._by_matrix(node, left, right)
        if node.target is _SUMS and node.args[1] is self._tokens:
            return self._by_table(node)
        return None

    def _product(
        self, node: fx.Node, bias: list[Any], rows: _ReorderedRows, matrix: Any
    ) -> fx.Node | None:
        """Replace E[i] W by a lookup in E W; a bias must be the same for all rows."""
        if any(operand.meta["val"].dim() > 1 for operand in bias):
            return None
        product = self._call(node, node.target, *bias, self._table, matrix, **node.kwargs)
        return self._call(node, _ROWS, product, self._tokens_of(node, rows))

    def _by_matrix(self, node: fx.Node, left: Any, right: Any) -> fx.Node | None:
        """Return S^T E for G^T E[i], and E^T S for E[i]^T G."""
        if not _is_transposed(left):
            return None
        left = left.args[0]
        if (rows := self._table_rows(right)) is not None:
            sums = self._sums_of(node, left, self._tokens_of(node, rows), rows.order())
            return self._call(node, _MM, self._call(node, _PERMUTE, sums, [1, 0]), self._table)
        if (rows := self._table_rows(left)) is not None:
            sums = self._sums_of(node, right, self._tokens_of(node, rows), rows.order())
            return self._call(node, _MM, self._call(node, _PERMUTE, self._table, [1, 0]), sums)
        return None

    def _by_table(self, node: fx.Node) -> fx.Node | None:
        """Return S W^T, which replaces the sums of the rows of G W^T over equal tokens.

        Returns None unless a product before this node has put the tokens into the order of G.
        """
        rows = _trace_rows(node.args[0])  # type: ignore[arg-type]
        skips = node.args[3] != -1 or node.args[4]
        if rows.base.target is not _MM or skips or node.args[2] != len(self._table.meta["val"]):
            return None
        gradient, matrix = rows.base.args
        order = rows.order().argsort()
        tokens = self._ordered.get(_key(order))
        if tokens is None:
            return None
        return self._call(node, _MM, self._sums_of(node, gradient, tokens, order), matrix)

    def _sums_of(
        self, node: fx.Node, gradient: Any, tokens: fx.Node, order: torch.Tensor
    ) -> fx.Node:
        """Return S for a gradient: row n belongs to `tokens[n]`.

        `order` has the number of each row in the embedding, so that equal sums are made once.
        """
        moved = _trace_rows(gradient)
        key = moved.base, _key(order[moved.order().argsort()])
        if key not in self._sums:
            count = len(self._table.meta["val"])
            self._sums[key] = self._call(node, _SUMS, gradient, tokens, count, -1, False)
        return self._sums[key]

    def _table_rows(self, node: Any) -> _ReorderedRows | None:
        """Return the rows of this embedding, if `node` holds them."""
        moved = _trace_rows(node)
        return moved if moved.base is self._rows else None

    def _tokens_of(self, node: fx.Node, rows: _ReorderedRows) -> fx.Node:
        """Return the flattened tokens that belong to rows of the embedding."""
        key = _key(rows.order())
        if key not in self._ordered:
            tokens = self._tokens
            for step in rows.steps:
                tokens = self._call(node, step.target, tokens, _without_columns(step))
            self._ordered[key] = tokens
        return self._ordered[key]

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call before `node`, in its layer."""
        call = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda arg: _row_major(arg.meta["val"]))
        call.meta.update(node.meta, val=target(*values[0], **values[1]))
        return call


def _row_major(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _is_transposed(node: fx.Node) -> bool:
    if node.target not in (_PERMUTE, aten.t.default):
        return False
    matrix = node.meta["val"].dim() == 2
    return bool(matrix) and not _moves_rows(node)


def _key(order: torch.Tensor) -> bytes:
    return order.numpy().tobytes()
