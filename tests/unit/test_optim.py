"""Update rules against torch.optim, as plain functions and as traced programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_harness import TABLES, run

from hetpipe import optim
from hetpipe.capture.program import GRAD, PARAM, SCALAR, STATE
from hetpipe.capture.update import trace_update
from hetpipe.errors import HetpipeError
from hetpipe.optim import Optimizer

LR = 0.03125  # exact in float32
RULES: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.sgd(LR), lambda p: torch.optim.SGD(p, LR)),
    "momentum": (
        optim.sgd(LR, 0.9, 0.01), lambda p: torch.optim.SGD(p, LR, 0.9, weight_decay=0.01),
    ),
    "nesterov": (
        optim.sgd(LR, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, LR, 0.9, nesterov=True),
    ),
    "adam": (optim.adam(LR), lambda p: torch.optim.Adam(p, LR)),
    "adam_decay": (
        optim.adam(LR, (0.8, 0.99), 1e-6, 0.1),
        lambda p: torch.optim.Adam(p, LR, (0.8, 0.99), 1e-6, 0.1),
    ),
    "adamw": (optim.adamw(LR), lambda p: torch.optim.AdamW(p, LR)),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-15)])
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_torch(name: str, dtype: torch.dtype, tolerance: float) -> None:
    rule, make = RULES[name]
    torch.manual_seed(0)
    start = torch.randn(5, 3, dtype=dtype)
    reference = torch.nn.Parameter(start.clone())
    theirs = make([reference])
    param, state = start.clone(), tuple(torch.zeros_like(start) for _ in rule.state)
    for step in range(1, 21):
        gradient = torch.randn(5, 3, dtype=dtype)
        reference.grad = gradient.clone()
        theirs.step()
        scalars = (torch.tensor(float(step), dtype=dtype), torch.tensor(LR, dtype=dtype))
        param, state = rule.update(param, gradient, state, *scalars)
    error = float((param - reference.detach()).abs().max())
    assert error <= tolerance * float(start.abs().max())
    assert float((param - start).abs().max()) > 0.1, "nothing was learnt"


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", RULES)
def test_program_equals_torch(name: str, table: str) -> None:
    rule, make = RULES[name]
    torch.manual_seed(0)
    start = {"a": torch.randn(4, 3), "b": torch.randn(7)}
    program = trace_update(rule, start, {"tied": torch.empty(2)}, TABLES[table])
    assert program is not None
    references = {n: torch.nn.Parameter(v.clone()) for n, v in start.items()}
    theirs = make(list(references.values()))
    env = {(PARAM, n): v for n, v in start.items()}
    env.update({(STATE, f"{s}/{n}"): torch.zeros_like(v) for s in rule.state
                for n, v in start.items()})  # fmt: skip
    env[SCALAR, "lr"], env[SCALAR, "grad_scale"] = torch.tensor(LR), torch.tensor(0.25)
    for step in range(1, 6):
        env[SCALAR, "step"] = torch.tensor(float(step))
        env[GRAD, "tied"] = torch.ones(2)
        for n, reference in references.items():
            reference.grad = torch.randn_like(reference)
            env[GRAD, n] = reference.grad * 4
        theirs.step()
        env.update(run(program, env))
    for n, reference in references.items():
        torch.testing.assert_close(env[PARAM, n], reference.detach(), atol=1e-6, rtol=1e-6)
        assert not env[GRAD, n].any()
    assert not env[GRAD, "tied"].any()
    assert all((s.role, s.name) != (PARAM, "tied") for s in program.outputs)


def test_programs_are_small() -> None:
    """Few nodes per parameter: updates run once per step and parameter on every device."""
    shapes = {"a": torch.empty(3), "b": torch.empty(4)}

    def calls(count: int) -> int:
        some = dict(list(shapes.items())[:count])
        program = trace_update(optim.adam(), some, {}, {})
        assert program is not None
        return sum(node.op == "call_function" for node in program.graph.graph.nodes)

    assert calls(2) - calls(1) <= 12


def test_bad_settings() -> None:
    with pytest.raises(HetpipeError, match="lr must not be negative, but is -1"):
        optim.sgd(-1)
    with pytest.raises(HetpipeError, match="nesterov needs a momentum"):
        optim.sgd(0.1, nesterov=True)
    with pytest.raises(HetpipeError, match="betas must lie in"):
        optim.adam(betas=(0.9, 1.0))
