"""Programs that work on all parameters of a stage, or all their gradients, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.joint import Decompositions
from hetpipe.capture.program import GRAD, NORM, PARAM, SCALAR, STATE, Program
from hetpipe.capture.slots import Key, make_program, placeholders, results, simplify
from hetpipe.optim.rule import Optimizer

Env = Mapping[Key, torch.Tensor]


def trace_update(
    optimizer: Optimizer,
    updated: Mapping[str, torch.Tensor],
    only_zeroed: Mapping[str, torch.Tensor],
    decompositions: Decompositions,
) -> Program | None:
    """PARAM, GRAD, STATE, SCALAR -> PARAM, STATE, GRAD (zeros); None if there is no gradient.

    `updated` are the parameters that the stage owns, as tensors of their shapes. Those in
    `only_zeroed` are tied to an earlier stage, and only get zeroed gradients. The rule gets
    gradients multiplied by `grad_scale`.
    """
    if not updated and not only_zeroed:
        return None
    everything = {**updated, **only_zeroed}
    inputs: list[Key] = [(PARAM, name) for name in updated]
    inputs += [(GRAD, name) for name in everything]
    inputs += _states(optimizer, updated)
    inputs += _scalars("lr", "step", "grad_scale")

    def update(env: Env) -> dict[Key, torch.Tensor]:
        results: dict[Key, torch.Tensor] = {}
        for name in updated:
            results.update(_one(optimizer, env, name))
        for name in everything:
            results[GRAD, name] = torch.zeros_like(env[GRAD, name])
        order = (PARAM, STATE, GRAD)
        return {key: results[key] for key in sorted(results, key=lambda key: order.index(key[0]))}

    return _trace(update, inputs, everything, decompositions)


def trace_predict(
    optimizer: Optimizer, updated: Mapping[str, torch.Tensor], decompositions: Decompositions
) -> Program | None:
    """PARAM, STATE, SCALAR -> PARAM, as expected after `ahead` more updates than `step`.

    None if the optimizer predicts nothing, or there is no parameter.
    """
    if not updated or optimizer.predict is None:
        return None
    inputs: list[Key] = [(PARAM, name) for name in updated]
    inputs += _states(optimizer, updated)
    inputs += _scalars("lr", "step", "ahead")

    def predict(env: Env) -> dict[Key, torch.Tensor]:
        how = [env[key] for key in _scalars("step", "lr", "ahead")]
        predicted: dict[Key, torch.Tensor] = {}
        for name in updated:
            rule = optimizer.rule_for(name).predict
            assert rule is not None, "an undecayed rule predicts where the decayed one does"
            predicted[PARAM, name] = rule(env[PARAM, name], _state(optimizer, env, name), *how)
        return predicted

    return _trace(predict, inputs, updated, decompositions)


def trace_norm(
    gradients: Mapping[str, torch.Tensor], decompositions: Decompositions
) -> Program | None:
    """GRAD, SCALAR -> NORM: the sum of squares of all gradients times `grad_scale`.

    The root of the sum over stages is the norm for clipping by global norm. None without gradients.
    """
    if not gradients:
        return None
    inputs: list[Key] = [(GRAD, name) for name in gradients]
    inputs += _scalars("grad_scale")

    def square(env: Env) -> dict[Key, torch.Tensor]:
        scaled = [env[GRAD, name] * env[SCALAR, "grad_scale"] for name in gradients]
        squares = [(gradient * gradient).sum().to(torch.float32) for gradient in scaled]
        return {(NORM, "square"): sum(squares[1:], squares[0])}

    return _trace(square, inputs, gradients, decompositions)


def _trace(
    compute: Callable[[Env], dict[Key, torch.Tensor]],
    inputs: Sequence[Key],
    parameters: Mapping[str, torch.Tensor],
    decompositions: Decompositions,
) -> Program:
    outputs: list[Key] = []

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        results = compute(dict(zip(inputs, values, strict=True)))
        outputs[:] = results
        return list(results.values())

    with FakeTensorMode():
        values = [_example(key, parameters) for key in inputs]
        with torch.no_grad():
            module = make_fx(run, decomposition_table=dict(decompositions))(*values)
    simplify(module.graph)
    merge_equal(module.graph)
    return make_program(
        module.graph,
        list(zip(inputs, placeholders(module.graph), strict=True)),
        list(zip(outputs, results(module.graph), strict=True)),
    )


def _scalars(*names: str) -> list[Key]:
    return [(SCALAR, name) for name in names]


def _states(optimizer: Optimizer, names: Iterable[str]) -> list[Key]:
    return [(STATE, f"{slot}/{name}") for slot in optimizer.state for name in names]


def _state(optimizer: Optimizer, env: Env, name: str) -> tuple[torch.Tensor, ...]:
    return tuple(env[key] for key in _states(optimizer, [name]))


def _one(optimizer: Optimizer, env: Env, name: str) -> dict[Key, torch.Tensor]:
    gradient = env[GRAD, name] * env[SCALAR, "grad_scale"]
    state = _state(optimizer, env, name)
    parameter, new_state = optimizer.rule_for(name).update(
        env[PARAM, name], gradient, state, env[SCALAR, "step"], env[SCALAR, "lr"]
    )
    new = zip(_states(optimizer, [name]), new_state, strict=True)
    return {(PARAM, name): parameter, **dict(new)}


def _example(key: Key, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    role, name = key
    if role == SCALAR:
        return torch.empty((), dtype=torch.float32)
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
