"""Traces programs that work on all parameters or all gradients of a stage at once.

An optimizer's rule is traced once for all parameters of one shape, then copied for each of them. A
split parameter needs a rule that updates each row without reading other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.program import GRAD, NORM, PARAM, SCALAR, STATE, Decompositions, Program
from hetpipe.capture.slots import Key, is_tensor, make_program, placeholders, results, simplify
from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer
from hetpipe.sdk.graph import operator_name

Nodes = Sequence[fx.Node]
Formula = Callable[..., Sequence[torch.Tensor]]
"""A function from tensors to tensors."""


class Formulas:
    """Graphs of formulas in the operators of a backend, each traced once for its shapes."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = dict(decompositions)
        self._graphs: dict[Any, fx.Graph] = {}

    def graph(self, key: Any, formula: Formula, values: Sequence[torch.Tensor]) -> fx.Graph:
        """Return the graph of `formula`, which `key` identifies, for the shapes of `values`."""
        key = key, tuple((value.shape, value.dtype) for value in values)
        if key not in self._graphs:
            with FakeTensorMode(), torch.no_grad():
                examples = [torch.empty(value.shape, dtype=value.dtype) for value in values]
                module = make_fx(formula, decomposition_table=self._decompositions)(*examples)
            simplify(module.graph)
            self._graphs[key] = module.graph
        return self._graphs[key]


class _ProgramBuilder:
    """A program under construction, from copies of the graphs of formulas."""

    def __init__(self, formulas: Formulas, parameters: Mapping[str, torch.Tensor]) -> None:
        self._formulas, self._parameters = formulas, parameters
        wide = any(parameter.dtype is torch.float64 for parameter in parameters.values())
        self.scalars = torch.float64 if wide else torch.float32
        self._graph = fx.Graph()
        self._inputs: dict[Key, fx.Node] = {}

    def inputs(self, keys: Iterable[Key]) -> list[fx.Node]:
        """Return inputs of the program. The first call must name all inputs in order."""
        for key in keys:
            if key not in self._inputs:
                node = self._graph.placeholder("_".join(key))
                node.meta["val"] = _example(key, self._parameters, self.scalars)
                self._inputs[key] = node
        return [self._inputs[key] for key in keys]

    def apply(self, key: Any, formula: Formula, arguments: Nodes) -> list[fx.Node]:
        """Return the results of a formula, see `Formulas.graph`."""
        values = [node.meta["val"] for node in arguments]
        graph = self._formulas.graph(key, formula, values)
        copies = dict(zip(placeholders(graph), arguments, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                copies[node] = self._graph.node_copy(node, copies.__getitem__)
        return [copies[node] for node in results(graph)]

    def program(self, outputs: Mapping[Key, fx.Node]) -> Program:
        """Return the program with these results."""
        self._graph.output(tuple(outputs.values()))
        simplify(self._graph)
        merge_equal(self._graph)
        order = zip(outputs, results(self._graph), strict=True)
        return make_program(self._graph, list(self._inputs.items()), list(order))


def trace_update(
    optimizer: Optimizer,
    updated: Mapping[str, torch.Tensor],
    only_zeroed: Mapping[str, torch.Tensor],
    formulas: Formulas,
) -> Program | None:
    """Trace PARAM, GRAD, STATE, SCALAR -> PARAM, STATE, GRAD (zeros); None without gradients.

    `updated` are the parameters that the stage owns, as tensors of their shapes. The parameters
    `only_zeroed` belong to an earlier stage (tied weights): only their gradients are zeroed. The
    rule gets gradients multiplied by `grad_scale`.
    """
    if not updated and not only_zeroed:
        return None
    everything = {**updated, **only_zeroed}
    program = _ProgramBuilder(formulas, everything)
    program.inputs(
        [
            *((PARAM, name) for name in updated),
            *((GRAD, name) for name in everything),
            *_states(optimizer, updated),
            *_rates(optimizer, updated),
            *_scalars("step", "grad_scale"),
        ]
    )
    outputs: dict[Key, fx.Node] = {}
    for name in updated:
        rule = optimizer.rule_for(name)
        keys = [(PARAM, name), *_states(rule, [name])]
        scalars = [*_scalars("step"), *_rates(optimizer, [name]), *_scalars("grad_scale")]
        arguments = program.inputs([keys[0], (GRAD, name), *keys[1:], *scalars])
        *new, outputs[GRAD, name] = program.apply(rule, partial(_update_one, rule), arguments)
        outputs.update(zip(keys, new, strict=True))
    for name in only_zeroed:
        accumulator = program.inputs([(GRAD, name)])
        zero = program.apply("zeros", lambda gradient: [torch.zeros_like(gradient)], accumulator)
        (outputs[GRAD, name],) = zero
    order = (PARAM, STATE, GRAD)
    keys = sorted(outputs, key=lambda key: order.index(key[0]))
    return program.program({key: outputs[key] for key in keys})


def trace_predict(
    optimizer: Optimizer,
    updated: Mapping[str, torch.Tensor],
    formulas: Formulas,
    others: Mapping[str, torch.Tensor] | None = None,
) -> Program | None:
    """Trace PARAM, STATE, SCALAR -> PARAM, as expected after `ahead` more updates than `step`.

    None if a group of the optimizer predicts nothing, or there is no parameter. `others` are
    parameters that the stage does not update, but which count for the dtype of the scalars.
    """
    if not updated or not optimizer.predicts:
        return None
    program = _ProgramBuilder(formulas, {**updated, **(others or {})})
    scalars = _scalars("step", "ahead")
    rates = _rates(optimizer, updated)
    program.inputs([*((PARAM, n) for n in updated), *_states(optimizer, updated), *rates, *scalars])
    predicted: dict[Key, fx.Node] = {}
    for name in updated:
        rule = optimizer.rule_for(name)
        rate = _rates(optimizer, [name])
        keys = [(PARAM, name), *_states(rule, [name]), *rate, *scalars]
        formula = partial(_predict_one, rule)
        (predicted[PARAM, name],) = program.apply((rule, "ahead"), formula, program.inputs(keys))
    return program.program(predicted)


def trace_norm(
    gradients: Mapping[str, torch.Tensor],
    formulas: Formulas,
    others: Mapping[str, torch.Tensor] | None = None,
    squares: bool = True,
) -> Program | None:
    """Trace GRAD, SCALAR -> NORM: the sum of (`grad_scale` * gradient)^2 over all elements.

    The root of the sum over stages is the norm for clipping by global norm. None without gradients.
    `others` are gradients outside of the sum that only count for the dtype of the scalars. Without
    `squares` the result is the sum of the unscaled gradients, which costs less. If a gradient is
    not finite, neither is this sum.
    """
    if not gradients:
        return None
    program = _ProgramBuilder(formulas, {**gradients, **(others or {})})
    keys: list[Key] = [(GRAD, name) for name in gradients]
    if squares:
        *grads, scale = program.inputs([*keys, *_scalars("grad_scale")])
        terms = [program.apply("square", _square, [gradient, scale])[0] for gradient in grads]
    else:
        key = "total", program.scalars
        terms = [
            program.apply(key, lambda grad: [grad.sum().to(program.scalars)], [node])[0]
            for node in program.inputs(keys)
        ]
    total = terms[0]
    for term in terms[1:]:
        (total,) = program.apply("sum", lambda a, b: [a + b], [total, term])
    return program.program({(NORM, "square"): total})


def _update_one(
    rule: Optimizer, parameter: torch.Tensor, gradient: torch.Tensor, *others: torch.Tensor
) -> list[torch.Tensor]:
    """Compute parameter, gradient, state, step, lr, grad_scale -> parameter, state, zero."""
    *state, step, lr, grad_scale = _narrow(others, parameter)
    new, new_state = rule.update(parameter, gradient * grad_scale, tuple(state), step, lr)
    return [new, *new_state, torch.zeros_like(gradient)]


def _predict_one(
    rule: Optimizer, parameter: torch.Tensor, *others: torch.Tensor
) -> list[torch.Tensor]:
    """Compute parameter, state, lr, step, ahead -> parameter."""
    *state, lr, step, ahead = _narrow(others, parameter)
    assert rule.predict is not None, "every group predicts"
    return [rule.predict(parameter, tuple(state), step, lr, ahead)]


def _narrow(values: Sequence[torch.Tensor], parameter: torch.Tensor) -> list[torch.Tensor]:
    """Cast float64 scalars to float32, unless the parameter is float64.

    A model with float64 parameters has float64 scalars for all parameters.
    """
    if parameter.dtype is torch.float64:
        return list(values)
    return [v.to(torch.float32) if v.dtype is torch.float64 else v for v in values]


def _square(gradient: torch.Tensor, grad_scale: torch.Tensor) -> list[torch.Tensor]:
    (scale,) = _narrow([grad_scale], gradient)
    scaled = gradient * scale
    return [(scaled * scaled).sum().to(grad_scale.dtype)]


def _scalars(*names: str) -> list[Key]:
    return [(SCALAR, name) for name in names]


def _rates(optimizer: Optimizer, names: Iterable[str]) -> list[Key]:
    """Return the scalars with the learning rates of these parameters."""
    rates = (optimizer.rule_for(name).lr for name in names)
    return _scalars(*dict.fromkeys(optimizer.scalars[rate] for rate in rates))


def _states(optimizer: Optimizer, names: Iterable[str]) -> list[Key]:
    """Return the state tensors of these parameters."""
    slots = dict.fromkeys(slot for rule in optimizer.rules for slot in rule.state)
    states = {name: optimizer.rule_for(name).state for name in names}
    return [(STATE, f"{slot}/{name}") for slot in slots for name in states if slot in states[name]]


def _example(
    key: Key, parameters: Mapping[str, torch.Tensor], scalars: torch.dtype
) -> torch.Tensor:
    role, name = key
    if role == SCALAR:
        return torch.empty((), dtype=scalars)
    parameter = parameters[name.partition("/")[2] if role == STATE else name]
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def merge_equal(graph: fx.Graph) -> None:
    """Keep one of several calls with the same operator and arguments."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
"""Operators with independent elements that torch does not tag as pointwise."""


def check_elementwise(
    optimizer: Optimizer, rows: Mapping[str, int], parameters: Mapping[str, Any]
) -> None:
    """Raise `HetpipeError` unless the first rows of a parameter can be updated alone.

    `rows` has the number of first rows by parameter name, and `parameters` has the shapes by name.
    """
    for name, count in rows.items():
        rule, shape = optimizer.rule_for(name), parameters[name].shape
        whole, part = (_operators(rule, (extent, *shape[1:])) for extent in (shape[0], count))
        mixing = next((node for node in whole if _mixes(node)), None)
        if mixing is None and list(map(_describe, whole)) == list(map(_describe, part)):
            continue
        why = "depends on its shape" if mixing is None else f"has {operator_name(mixing)}"
        raise HetpipeError(
            f"split: the update of {optimizer.name} {why}, but a split makes the first"
            f" {count} of {shape[0]} rows of {name} a separate parameter; remove "
            "split, or choose an elementwise optimizer, such as hp.optim.adamw"
        )


def _operators(rule: Optimizer, shape: tuple[int, ...]) -> list[fx.Node]:
    """Return the calls of an update, and of a prediction, of a parameter of this shape."""
    with FakeTensorMode(), torch.no_grad():
        scalar = [torch.empty(()) for _ in range(3)]
        tensors = [torch.empty(shape) for _ in range(2 + len(rule.state))]
        graph = make_fx(_run(rule))(tensors, scalar).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def _run(rule: Optimizer) -> Callable[..., Any]:
    def run(tensors: list[torch.Tensor], scalars: list[torch.Tensor]) -> Any:
        parameter, gradient, *state = tensors
        step, lr, ahead = scalars
        updated = rule.update(parameter, gradient, tuple(state), step, lr)
        if rule.predict is None:
            return updated
        return updated, rule.predict(parameter, tuple(state), step, lr, ahead)

    return run


def _mixes(node: fx.Node) -> bool:
    """Return whether an element of the result may depend on several elements of an argument."""
    target: Any = node.target
    reads_elements = any(is_tensor(n) and n.meta["val"].ndim for n in node.all_input_nodes)
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ELEMENTWISE
    return reads_elements and not pointwise


def _describe(node: fx.Node) -> str:
    return f"{node.target}{node.args}{node.kwargs}"
