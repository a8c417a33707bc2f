"""The canonical form of a graph, and helpers that backends and hetpipe share.

A graph is a `torch.fx.GraphModule` with
- placeholders: the inputs, in order;
- `call_function` nodes: ATen or `hetpipe` operators (`torch._ops.OpOverload`), or
  `operator.getitem`. They have static shapes and change no tensor. No node is a `get_attr`;
- arguments: nodes, numbers, bools, None, strings, `torch.dtype`, and lists of these;
- `meta["val"]` on every node: a tensor on the meta device (row-major at inputs and outputs), or a
  tuple of such tensors. Strides of values inside the graph are torch's and do not bind a backend,
  which may treat `aten.view` as a reshape of the row-major tensor;
- one output: a flat tuple of nodes, which may repeat and may be placeholders.
`meta["layer"]`, where present, names the layer of the user's model that a node came from.
`meta["steady"]` on a placeholder marks a weight: many runs in a row get the same buffer, so a
device may keep results that it computes from steady inputs alone, until another buffer comes.
`meta["together"]` on the output node is a set of indices of results. The caller donates these
results together to one later run, so they may share one allocation. `dump_graph` drops this set.
`meta["checked"]` on a placeholder of integers is the range (low, size, ignored) that the caller has
checked: see `hetpipe.sdk.indices`.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

import hetpipe.sdk.operators.attention
import hetpipe.sdk.operators.corrected
import hetpipe.sdk.operators.masked_attention
import hetpipe.sdk.operators.random
import hetpipe.sdk.operators.recurrent
import hetpipe.sdk.operators.replicas  # these imports register operators for load_graph
from hetpipe import data_pickle
from hetpipe.errors import BackendError

_Function = Callable[..., Any]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


def operator_name(node: fx.Node) -> str:
    """Return the name of a call's operator, such as `aten.add.Tensor`, or `getitem`."""
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target)


def graph_inputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the placeholders in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def graph_outputs(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that the graph returns, in order."""
    return list(graph.graph.output_node().args[0])  # type: ignore[arg-type]


def graph_calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Return the operator calls in order, `getitem` included."""
    return (node for node in graph.graph.nodes if node.op == "call_function")


def core_decompositions(keep: Iterable[str] = ()) -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions down to core ATen, except for the operators named in `keep`.

    `keep` holds names such as `aten.gelu.default` or, for all overloads, `aten.gelu`. The table
    also decomposes hetpipe's operators for attention and LSTM layers.
    """
    from torch._decomp import core_aten_decompositions

    kept = frozenset(keep)
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table |= hetpipe.sdk.operators.corrected.DECOMPOSITIONS
    table |= hetpipe.sdk.operators.attention.DECOMPOSITIONS
    table |= hetpipe.sdk.operators.masked_attention.DECOMPOSITIONS
    table |= hetpipe.sdk.operators.recurrent.DECOMPOSITIONS
    return without(kept, table)


def without(kept: Container[str], table: Mapping[Any, _Function]) -> dict[Any, _Function]:
    """Return a table of decompositions without the operators, or overloads, named in `kept`."""
    return {
        op: fn
        for op, fn in table.items()
        if str(op) not in kept and str(op).rpartition(".")[0] not in kept
    }


_FURTHER = (
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm",
    "_native_batch_norm_legit_no_training", "native_layer_norm", "_log_softmax", "_softmax",
    "elu", "gelu", "hardtanh", "leaky_relu", "max_pool2d_with_indices_backward", "slice_scatter",
)  # fmt: skip
"""Core ATen operators that torch can decompose into other core ATen operators."""


def primitive_decompositions(keep: Iterable[str] = ()) -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions that leave the fewest operators, so a device needs the fewest kernels.

    They decompose operators of core ATen and dropout's masks as well. The decomposed masks need
    int64 arithmetic, with shifts and bitwise operators. `keep` is as for `core_decompositions`.
    """
    from torch._decomp import get_decompositions

    further = get_decompositions([getattr(torch.ops.aten, name) for name in _FURTHER])
    further |= hetpipe.sdk.operators.random.DECOMPOSITIONS
    kept = frozenset(keep)
    return {**core_decompositions(kept), **without(kept, further)}


def why_not_fill(node: fx.Node) -> str | None:
    """Return the fault of a fill from a tensor of several elements; None for any other node."""
    if node.target is not torch.ops.aten.fill.Tensor:
        return None
    count = node.args[1].meta["val"].numel()  # type: ignore[union-attr] # a tensor
    return None if count == 1 else f"a fill takes one element, but its tensor has {count}"


def why_not_strided(node: fx.Node) -> str | None:
    """Return the fault of an `as_strided` beyond its row-major tensor; None for any other node."""
    if node.target is not torch.ops.aten.as_strided.default:
        return None
    size, offset = node.meta["val"].shape, strided_offset(node)
    strides: Any = node.args[2]
    last = offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    count = node.args[0].meta["val"].numel()  # type: ignore[union-attr] # a tensor
    if size.numel() == 0 or last < count:
        return None
    return f"as_strided reaches element {last} of a tensor that has {count}"


def strided_offset(node: fx.Node) -> int:
    """Return the index of the first element that an `as_strided` reads."""
    offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return int(offset or 0)


_Ref = tuple[str, Any]


def dump_graph(graph: fx.GraphModule | fx.Graph) -> bytes:
    """Serialise a canonical graph; `load_graph` restores it in another process."""
    return pickle.dumps(graph_rows(graph))


def graph_structure(graph: fx.GraphModule | fx.Graph) -> list[tuple[Any, ...]]:
    """Return the graph without names: two graphs with equal structures run in the same way.

    The site of a random operator counts as a name: it only decides which numbers are drawn.
    """
    structure = []
    for op, _, target, args, kwargs, val, _, steady, checked in graph_rows(graph):
        if op != "call_function":
            target = ""
        elif target in _DRAWING:
            args = [arg for index, arg in enumerate(args[1]) if index != _SITE]
        structure.append((op, target, args, sorted(kwargs.items()), val, steady, checked))
    return structure


_DRAWING = ("hetpipe.keep_mask.default", "hetpipe.uniform.default")
_SITE = 1  # index of the argument that numbers the call in the model


def graph_rows(graph: fx.GraphModule | fx.Graph) -> list[tuple[Any, ...]]:
    """Return a row per node: op, name, target, args, kwargs, val, layer, steady, checked.

    Rows hold plain values. An argument is (kind, value), with a kind of node, dtype, none, list or
    value; a node's value is its row's number. `val` is (shape, dtype), None, or a list of these.
    """
    index: dict[fx.Node, int] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", index[value])
        if isinstance(value, torch.dtype):
            return ("dtype", dtype_name(value))
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return ("none", None)
        if isinstance(value, (list, tuple)):
            return ("list", [pack(item) for item in value])
        return ("value", value)

    rows: list[tuple[Any, ...]] = []
    for node in (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes:
        if node.op == "get_attr":
            raise BackendError(f"graph is not canonical: it reads the attribute {node.target}")
        target = operator_name(node) if node.op == "call_function" else str(node.target)
        kwargs = {key: pack(value) for key, value in node.kwargs.items()}
        rows.append(
            (node.op, node.name, target, pack(node.args), kwargs, _pack_val(node.meta.get("val")),
             node.meta.get("layer"), bool(node.meta.get("steady")), node.meta.get("checked"))
        )  # fmt: skip
        index[node] = len(index)
    return rows


def resolve_operator(name: str) -> Any:
    """Return the operator with a name; the inverse of `operator_name`.

    Raises `BackendError` if this process has no such operator or overload.
    """
    if name == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload) or str(found) != name:
        raise BackendError(f"a graph calls {name!r}, but torch has no operator of that name here")
    return found


class MissingOperator:
    """Stands for an operator that torch lacks here; `refusal` refuses its calls on every device."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BackendError(f"torch {torch.__version__} has no operator {self}")


def load_graph(data: bytes) -> fx.GraphModule:
    """Restore a graph from `dump_graph`; each `meta["val"]` is row-major on the meta device.

    The graph may come from a host with another torch: see `MissingOperator`.
    """
    return graph_of_rows(data_pickle.loads(data), _found_or_missing)


def _found_or_missing(name: str) -> Any:
    try:
        return resolve_operator(name)
    except BackendError:
        return MissingOperator(name)


def graph_of_rows(
    rows: Iterable[tuple[Any, ...]], resolve: Callable[[str], Any] = resolve_operator
) -> fx.GraphModule:
    """Restore a graph from `graph_rows`; `resolve` returns an operator by its name.

    By default raises `BackendError` for an unknown operator.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def unpack(item: _Ref) -> Any:
        tag, value = item
        if tag == "node":
            return nodes[value]
        if tag == "dtype":
            return getattr(torch, value)
        if tag == "list":
            return [unpack(entry) for entry in value]
        return value

    for op, name, target, args, kwargs, val, layer, steady, checked in rows:
        if op == "placeholder":
            node = graph.placeholder(name)
        elif op == "output":
            node = graph.output(tuple(unpack(args)[0]))
        else:
            node = graph.create_node(
                op,
                resolve(target),
                tuple(unpack(args)),
                {key: unpack(value) for key, value in kwargs.items()},
                name=name,
            )
        node.meta["val"] = _unpack_val(val)
        if layer is not None:
            node.meta["layer"] = layer
        if steady:
            node.meta["steady"] = True
        if checked is not None:
            node.meta["checked"] = checked
        nodes.append(node)
    return _LazyGraphModule(torch.nn.Module(), graph)  # its first call makes the code


def of_one_replica(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without sums over replicas, for a single replica, which has all rows."""
    if not any(map(hetpipe.sdk.operators.replicas.is_sum, graph.graph.nodes)):
        return graph
    alone = canonical(graph)
    hetpipe.sdk.operators.replicas.drop_sums(alone.graph)
    return alone


def canonical(graph: fx.GraphModule | fx.Graph) -> fx.GraphModule:
    """Copy `graph` into the canonical form, with each `meta["val"]` on the meta device."""
    return load_graph(dump_graph(graph))


def _pack_val(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return (tuple(int(size) for size in val.shape), dtype_name(val.dtype))
    if isinstance(val, (tuple, list)):
        return [_pack_val(item) for item in val]
    return None


def _unpack_val(val: Any) -> Any:
    if isinstance(val, tuple):
        return torch.empty(val[0], dtype=getattr(torch, val[1]), device="meta")
    if isinstance(val, list):
        return tuple(_unpack_val(item) for item in val)
    return None
