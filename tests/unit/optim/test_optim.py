"""Update rules, compared with torch.optim and the papers, as functions and as traced programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_harness import TABLES, run
from published_optimizers import Lamb, Lion

from hetpipe import optim
from hetpipe.capture.passes.update_programs import Formulas, trace_update
from hetpipe.capture.program import GRAD, PARAM, SCALAR, STATE
from hetpipe.errors import HetpipeError
from hetpipe.optim import Optimizer

LR = 0.03125  # exact in float32
RULES: dict[str, tuple[Optimizer, Callable[[Any], Any]]] = {
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
    "rmsprop": (optim.rmsprop(LR), lambda p: torch.optim.RMSprop(p, LR)),
    "rmsprop_momentum": (
        optim.rmsprop(LR, 0.9, 1e-6, 0.1, 0.8),
        lambda p: torch.optim.RMSprop(p, LR, 0.9, 1e-6, 0.1, 0.8),
    ),
    "adagrad": (optim.adagrad(LR), lambda p: torch.optim.Adagrad(p, LR)),
    "adagrad_decay": (
        optim.adagrad(LR, 1e-6, 0.1),
        lambda p: torch.optim.Adagrad(p, LR, weight_decay=0.1, eps=1e-6),
    ),
    "lion": (optim.lion(LR), lambda p: Lion(p, LR, (0.9, 0.99), 0.0)),
    "lion_decay": (optim.lion(LR, (0.8, 0.95), 0.1), lambda p: Lion(p, LR, (0.8, 0.95), 0.1)),
    "lamb": (optim.lamb(LR), lambda p: Lamb(p, LR, (0.9, 0.999), 1e-6, 0.01)),
    "lamb_no_decay": (
        optim.lamb(LR, (0.8, 0.99), 1e-4, 0.0), lambda p: Lamb(p, LR, (0.8, 0.99), 1e-4, 0.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-15)])
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
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


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", RULES)
def test_program_equals_reference(name: str, table: str) -> None:
    rule, make = RULES[name]
    torch.manual_seed(0)
    start = {"a": torch.randn(4, 3), "b": torch.randn(7)}
    program = trace_update(rule, start, {"tied": torch.empty(2)}, Formulas(TABLES[table]))
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
    """Updates run once per step and parameter on every device, so few nodes per parameter
    matter."""
    shapes = {"a": torch.empty(3), "b": torch.empty(4)}

    def calls(count: int) -> int:
        some = dict(list(shapes.items())[:count])
        program = trace_update(optim.adam(), some, {}, Formulas({}))
        assert program is not None
        return sum(node.op == "call_function" for node in program.graph.graph.nodes)

    assert calls(2) - calls(1) <= 12


def test_bad_settings() -> None:
    with pytest.raises(HetpipeError, match="lr must be finite and not negative, but is -1"):
        optim.sgd(-1)
    with pytest.raises(HetpipeError, match="nesterov needs a momentum"):
        optim.sgd(0.1, nesterov=True)
    with pytest.raises(HetpipeError, match="betas must lie in"):
        optim.adam(betas=(0.9, 1.0))
    with pytest.raises(HetpipeError, match="alpha must lie in"):
        optim.rmsprop(alpha=1.5)
    with pytest.raises(HetpipeError, match="eps must be finite and not negative, but is -1"):
        optim.lamb(eps=-1)


def test_lamb_moves_zero_weights() -> None:
    """The ratio of norms is 1 if the weights, or their direction, are all zero."""
    rule, zero, grad = optim.lamb(LR, eps=0.0), torch.zeros(3), torch.tensor([1.0, -2.0, 3.0])
    scalars = (torch.tensor(1.0), torch.tensor(LR))
    param, _ = rule.update(zero, grad, (zero, zero), *scalars)
    torch.testing.assert_close(param, -LR * grad.sign())
    rule = optim.lamb(LR, weight_decay=0.0)
    param, _ = rule.update(grad, zero, (zero, zero), *scalars)
    assert torch.equal(param, grad)


def test_learning_rate() -> None:
    assert optim.sgd(0.5).lr_at(7) == 0.5
    assert optim.adam(lambda step: 1 / step).lr_at(4) == 0.25
    for value in (-0.5, float("nan"), float("inf"), None):
        schedule: Any = {3: value}.get
        with pytest.raises(HetpipeError, match=f"learning rate of update 3 is {value}"):
            optim.lion(schedule).lr_at(3)


DECAYING: dict[str, Callable[..., Optimizer]] = {
    "sgd": optim.sgd, "adam": optim.adam, "adamw": optim.adamw, "rmsprop": optim.rmsprop,
    "adagrad": optim.adagrad, "lion": optim.lion, "lamb": optim.lamb,
}  # fmt: skip


@pytest.mark.parametrize("make", DECAYING.values(), ids=DECAYING)
def test_excluded_parameters_do_not_decay(make: Callable[..., Optimizer]) -> None:
    """One program updates `a.weight` with decay and `a.bias` without."""
    plain, decayed = make(LR, weight_decay=0.0), make(LR, weight_decay=0.25)
    excluding = make(LR, weight_decay=0.25, decay_exclude=lambda name: name.endswith("bias"))
    torch.manual_seed(0)
    start = {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4)}
    env = {(PARAM, n): v for n, v in start.items()}
    env.update({(GRAD, n): torch.randn_like(v) for n, v in start.items()})
    env.update({(STATE, f"{s}/{n}"): torch.rand_like(v) for s in plain.state
                for n, v in start.items()})  # fmt: skip
    scalars = {"lr": LR, "step": 5.0, "grad_scale": 1.0}
    env.update({(SCALAR, name): torch.tensor(value) for name, value in scalars.items()})
    found = []
    for rule in (plain, decayed, excluding):
        program = trace_update(rule, start, {}, Formulas(TABLES["core"]))
        assert program is not None
        found.append(run(program, env))
    without, with_decay, mixed = found
    for name, expected in (("a.weight", with_decay), ("a.bias", without)):
        assert torch.equal(mixed[PARAM, name], expected[PARAM, name])
        assert not torch.equal(without[PARAM, name], with_decay[PARAM, name])


def test_exclusion_is_a_group() -> None:
    """A profile with exclusions differs from one without; the optimizer's name stays the same."""
    plain, excluding = optim.adamw(LR), optim.adamw(LR, decay_exclude="a.bias".__eq__)
    assert (plain.name, excluding.name) == ("adamw", "adamw")
    assert excluding.hyperparameters == plain.hyperparameters
    assert excluding.settings["1.weight_decay"] == 0.0
    assert excluding.members(["a.weight", "a.bias"]) == [["a.bias"]]
    assert excluding.rates_at(1) == {"lr": LR}
    assert plain.rule_for("a.bias") is plain
