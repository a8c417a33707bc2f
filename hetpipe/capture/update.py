"""An optimizer's rule over all parameters of a stage, as one program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.joint import Decompositions
from hetpipe.capture.program import GRAD, PARAM, SCALAR, STATE, Program
from hetpipe.capture.slots import Key, make_program, placeholders, results, simplify
from hetpipe.optim.rule import Optimizer

_SCALARS = ("lr", "step", "grad_scale")


def trace_update(
    optimizer: Optimizer,
    updated: Mapping[str, torch.Tensor],
    only_zeroed: Mapping[str, torch.Tensor],
    decompositions: Decompositions,
) -> Program | None:
    """PARAM, GRAD, STATE, SCALAR -> PARAM, STATE, GRAD (zeros); None if there is no gradient.

    `updated` are the parameters (shapes) that the stage owns; of `only_zeroed`, tied to an earlier
    stage, only the gradient is zeroed. The gradient is multiplied by `grad_scale` before the rule.
    """
    if not updated and not only_zeroed:
        return None
    everything = {**updated, **only_zeroed}
    inputs: list[Key] = [(PARAM, name) for name in updated]
    inputs += [(GRAD, name) for name in everything]
    inputs += [(STATE, f"{slot}/{name}") for slot in optimizer.state for name in updated]
    inputs += [(SCALAR, name) for name in _SCALARS]
    outputs: list[Key] = []

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        env = dict(zip(inputs, values, strict=True))
        found = {}
        for name in updated:
            found.update(_one(optimizer, env, name))
        for name in everything:
            found[GRAD, name] = torch.zeros_like(env[GRAD, name])
        ordered = sorted(found, key=lambda key: (PARAM, STATE, GRAD).index(key[0]))
        outputs[:] = ordered
        return [found[key] for key in ordered]

    with FakeTensorMode():
        values = [_example(key, everything) for key in inputs]
        with torch.no_grad():
            module = make_fx(run, decomposition_table=dict(decompositions))(*values)
    simplify(module.graph)
    merge_equal(module.graph)
    return make_program(
        module.graph,
        list(zip(inputs, placeholders(module.graph), strict=True)),
        list(zip(outputs, results(module.graph), strict=True)),
    )


def _one(
    optimizer: Optimizer, env: Mapping[Key, torch.Tensor], name: str
) -> dict[Key, torch.Tensor]:
    gradient = env[GRAD, name] * env[SCALAR, "grad_scale"]
    state = tuple(env[STATE, f"{slot}/{name}"] for slot in optimizer.state)
    parameter, new_state = optimizer.update(
        env[PARAM, name], gradient, state, env[SCALAR, "step"], env[SCALAR, "lr"]
    )
    results: dict[Key, torch.Tensor] = {(PARAM, name): parameter}
    for slot, value in zip(optimizer.state, new_state, strict=True):
        results[STATE, f"{slot}/{name}"] = value
    return results


def _example(key: Key, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    role, name = key
    if role == SCALAR:
        return torch.empty((), dtype=torch.float32)
    parameter = parameters[name.partition("/")[2] if role == STATE else name]
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def merge_equal(graph: fx.Graph) -> None:
    """Keep one of several calls with the same operator and arguments."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        else:
            known[key] = node
