"""Traces a stage's forward and backward into one graph, by tracing autograd itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from hetpipe.capture.passes.cut import StagePiece
from hetpipe.capture.passes.embedding_products import multiply_tables
from hetpipe.capture.passes.relu_masks import mask_pooled
from hetpipe.capture.program import CONSTANT, CUT, LOSS, TANGENT, Decompositions
from hetpipe.capture.slots import Key, constant_name, placeholders, results, simplify
from hetpipe.errors import CaptureError

aten = torch.ops.aten

_GRADIENT_BY_LAYOUT = frozenset({
    aten._linalg_det.default, aten._linalg_slogdet.default, aten.det.default,
    aten.linalg_det.default, aten.linalg_slogdet.default, aten.logdet.default,
    aten.slogdet.default,
})  # fmt: skip
"""Operators whose gradient formula depends on the layout of the operand.

They are traced on row-major operands, since devices have such operands.
"""


@dataclass
class Joint:
    """One graph: forward inputs and tangents -> forward outputs and gradients."""

    graph: fx.Graph
    inputs: dict[fx.Node, Key]  # TANGENT keys included
    outputs: list[tuple[Key, fx.Node]]
    gradients: list[tuple[Key, fx.Node]]  # by the key of the input
    constants: dict[str, torch.Tensor]


def trace_joint(
    piece: StagePiece, crossing: frozenset[str], decompositions: Decompositions
) -> Joint:
    """Trace a piece on row-major inputs; `crossing` names the CUT outputs with a tangent."""
    decompositions = {aten.view.default: _view, **decompositions}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = placeholders(piece.module.graph)
        primals = [
            _empty(node).requires_grad_(key in piece.differentiable)
            for key, node in zip(piece.inputs, nodes, strict=True)
        ]
        returned = results(piece.module.graph)
        tangent_of = [
            index
            for index, (role, name) in enumerate(piece.outputs)
            if role == LOSS or (role == CUT and name in crossing)
        ]
        tangent_of = tangent_of if piece.differentiable else []
        tangents = [_empty(returned[index]) for index in tangent_of]
        step = _TracedStep(piece, tangent_of)
        module = make_fx(step, decomposition_table=dict(decompositions))(*primals, *tangents)
        calls = (n.target for n in module.graph.nodes if n.op == "call_function")
        if any(isinstance(c, torch._ops.OpOverload) and c._schema.is_mutable for c in calls):
            module = _functionalize(module, [*primals, *tangents], decompositions, mode)
    return _make_joint(piece, module, step, tangent_of, decompositions)


def _view(x: torch.Tensor, size: Sequence[int]) -> Any:
    """Compute `aten.view`; if it would refuse the strides of `x`, view a row-major copy.

    Such strides occur because a decomposition may return another layout than the operator that it
    replaces. `simplify` drops the copy.
    """
    if x.is_contiguous():
        return NotImplemented
    with _disable_current_modes():
        likeness = torch.empty_strided(x.shape, x.stride(), device="meta")
        try:
            likeness.view(size)
        except RuntimeError:
            pass
        else:
            return NotImplemented
    return x.clone(memory_format=torch.contiguous_format).view(size)


def _empty(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype)


class _TracedStep:
    """The traced function. `received` has the indices of the inputs that got a gradient."""

    def __init__(self, piece: StagePiece, tangent_of: list[int]) -> None:
        self._piece, self._tangent_of = piece, tangent_of
        self._wrt = [i for i, key in enumerate(piece.inputs) if key in piece.differentiable]
        self.received: list[int] = []

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        count = len(self._piece.inputs)
        primals, tangents = values[:count], values[count:]
        labels = _Labels()
        gradients: tuple[torch.Tensor | None, ...] = ()
        with closing(_LabellingInterpreter(self._piece.module, labels)) as labelled:
            with torch.enable_grad():
                outputs = labelled.run(*primals)
            sources = [(i, t) for i, t in zip(self._tangent_of, tangents, strict=True)]
            sources = [(i, t) for i, t in sources if outputs[i].requires_grad]
            if sources and self._wrt:
                gradients = torch.autograd.grad(
                    [outputs[i] for i, _ in sources],
                    [primals[i] for i in self._wrt],
                    [tangent for _, tangent in sources],
                    allow_unused=True,
                )
        labels.flush()
        received = [(i, g) for i, g in zip(self._wrt, gradients, strict=False) if g is not None]
        self.received = [i for i, _ in received]
        return [output.detach() for output in outputs] + [gradient for _, gradient in received]


class _Labels:
    """Labels the nodes of a trace with a layer: the layer of the last switch before them."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._graph: fx.Graph = mode.tracer.graph
        self._last = next(iter(reversed(self._graph.nodes)))
        self._layer: str | None = None

    def flush(self) -> None:
        """Label the nodes added since the last flush."""
        newest = next(iter(reversed(self._graph.nodes)))
        while self._last is not newest:
            self._last = self._last.next
            if self._layer is not None:
                self._last.meta["layer"] = self._layer

    def switch(self, layer: str | None) -> None:
        """Let nodes added from now on belong to `layer`."""
        self.flush()
        self._layer = layer


class _LabellingInterpreter(fx.Interpreter):
    """Runs a graph under a trace and labels the traced nodes, also nodes of the backward."""

    def __init__(self, module: fx.GraphModule, labels: _Labels) -> None:
        super().__init__(module)
        self._labels = labels
        self._hooks: dict[Any, RemovableHandle] = {}

    def run_node(self, n: fx.Node) -> Any:
        layer = n.meta.get("layer")
        self._labels.switch(layer)
        result = super().run_node(n)
        if n.op == "call_function":
            self._watch(result, layer)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _GRADIENT_BY_LAYOUT:
            args = (args[0].contiguous(), *args[1:])  # `simplify` drops the copy
        return super().call_function(target, args, kwargs)

    def close(self) -> None:
        """Remove the hooks: the garbage collector cannot see cycles through autograd's nodes."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _watch(self, result: Any, layer: str | None) -> None:
        """Hook the call's autograd nodes: whenever one runs, the trace switches to `layer`."""
        items = result if isinstance(result, (tuple, list)) else (result,)
        stack: list[Any] = [r.grad_fn for r in items if isinstance(r, torch.Tensor)]
        while stack:
            grad_fn = stack.pop()
            if grad_fn is None or grad_fn in self._hooks:
                continue
            hook = grad_fn.register_prehook(lambda _: self._labels.switch(layer))
            self._hooks[grad_fn] = hook
            stack += [parent for parent, _ in grad_fn.next_functions]


def _functionalize(
    module: fx.GraphModule,
    values: list[torch.Tensor],
    decompositions: Decompositions,
    mode: FakeTensorMode,
) -> fx.GraphModule:
    """Trace again without mutation, since autograd's formulas contain in-place operators."""

    def run(*inputs: torch.Tensor) -> Any:
        return _LabellingInterpreter(module, _Labels()).run(*inputs)

    with mode, torch.no_grad():
        functional = torch.func.functionalize(run, remove="mutations")
        detached = [value.detach() for value in values]
        return make_fx(functional, decomposition_table=dict(decompositions))(*detached)


def _make_joint(
    piece: StagePiece,
    module: fx.GraphModule,
    step: _TracedStep,
    tangent_of: list[int],
    decompositions: Decompositions,
) -> Joint:
    _straighten(module.graph)
    simplify(module.graph)
    multiply_tables(module.graph, decompositions)
    mask_pooled(module.graph)
    tangents = [(TANGENT, piece.outputs[index][1]) for index in tangent_of]
    inputs = dict(zip(placeholders(module.graph), [*piece.inputs, *tangents], strict=True))
    constants = _lift_constants(piece, module, inputs)
    returned = results(module.graph)
    count = len(piece.outputs)
    gradients = [piece.inputs[index] for index in step.received]
    return Joint(
        module.graph,
        inputs,
        list(zip(piece.outputs, returned[:count], strict=True)),
        list(zip(gradients, returned[count:], strict=True)),
        constants,
    )


def _straighten(graph: fx.Graph) -> None:
    """Let every `as_strided` read a row-major tensor, as all tensors of a canonical graph are.

    A tensor whose elements are dense in another order, such as channels last, is permuted to that
    order. Raises `CaptureError` for a tensor with gaps.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source = node.all_input_nodes[0]
        value = source.meta["val"]
        if value.is_contiguous():
            continue
        strides = value.stride()
        order = sorted(range(value.ndim), key=lambda dim: (-strides[dim], -value.shape[dim]))
        straight = value.permute(order)
        if not straight.is_contiguous():
            raise CaptureError(
                f"layer {node.meta.get('layer', '?')} uses as_strided on a tensor that is not "
                "row-major; call contiguous() before it, or use slicing and permute"
            )
        with graph.inserting_before(node):
            permuted = graph.call_function(aten.permute.default, (source, order))
        permuted.meta.update(source.meta, val=straight)
        node.replace_input_with(source, permuted)


def _lift_constants(
    piece: StagePiece, module: fx.GraphModule, inputs: dict[fx.Node, Key]
) -> dict[str, torch.Tensor]:
    """Turn tensors that the trace created into CONSTANT inputs."""
    constants: dict[str, torch.Tensor] = {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if type(value) is not torch.Tensor:
            raise CaptureError(
                f"stage {piece.stage} makes a tensor ({node.name}) whose value is not known when "
                "the model is captured; register it as a buffer"
            )
        name = constant_name(f"stage{piece.stage}.{node.name}", value)
        constants[name] = value
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            lifted = module.graph.placeholder(node.name)
        lifted.meta["val"] = value
        inputs[lifted] = (CONSTANT, name)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
    return constants
