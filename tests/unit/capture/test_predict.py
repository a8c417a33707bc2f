"""Predicted weights, compared with float64 formulas and later updates; the norm of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from capture_harness import TABLES, Env, run
from capture_models import captured

from hetpipe import optim
from hetpipe.capture.passes.update_programs import Formulas, trace_norm, trace_predict
from hetpipe.capture.program import GRAD, NORM, PARAM, SCALAR, STATE
from hetpipe.errors import HetpipeError
from hetpipe.optim import Optimizer

LR, U, B1, B2, EPS, W = 0.03125, 0.9, 0.8, 0.95, 1e-3, 0.125
BETAS = (B1, B2)


def adam_direction(m: Any, v: Any, t: int) -> Any:
    return m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)


def lamb_direction(p: Any, m: Any, v: Any, t: int) -> Any:
    r = adam_direction(m, v, t) + W * p
    return np.linalg.norm(p) / np.linalg.norm(r) * r


def sgd_steps(p: Any, m: Any, s: int, nesterov: bool) -> Any:
    """Apply the updates one by one, with decay by today's weights."""
    today, total = p, 0.0 * p
    for _ in range(s):
        g = W * today
        m = U * m + g
        total = total + (g + U * m if nesterov else m)
    return p - LR * total


def adam_steps(p: Any, m: Any, v: Any, t: int, s: int, decay: float, decoupled: bool) -> Any:
    today, m, v = p, m / (1 - B1**t), v / (1 - B2**t)
    total = 0.0 * p
    for _ in range(s):
        m = B1 * m + (0 if decoupled else (1 - B1) * decay * today)
        total = total + m / (np.sqrt(v) + EPS)
        p = p * (1 - LR * decay) if decoupled else p
    return p - LR * total


Formula = Callable[[Any, Any, int, int], Any]
PREDICTING: dict[str, tuple[Optimizer, Formula]] = {
    "momentum": (optim.sgd(LR, U, W), lambda p, s, t, k: p - LR * k * s[0]),
    "nesterov": (optim.sgd(LR, U, nesterov=True), lambda p, s, t, k: p - LR * k * s[0]),
    "adam": (
        optim.adam(LR, BETAS, EPS, W), lambda p, s, t, k: p - LR * k * adam_direction(*s, t),
    ),
    "adamw": (
        optim.adamw(LR, BETAS, EPS, W), lambda p, s, t, k: p - LR * k * adam_direction(*s, t),
    ),
    "rmsprop": (optim.rmsprop(LR, momentum=U), lambda p, s, t, k: p - LR * k * s[1]),
    "lion": (optim.lion(LR, BETAS, W), lambda p, s, t, k: p - LR * k * np.sign(s[0])),
    "lamb": (
        optim.lamb(LR, BETAS, EPS, W), lambda p, s, t, k: p - LR * k * lamb_direction(p, *s, t),
    ),
    "momentum_steps": (
        optim.multi_step(optim.sgd(LR, U, W)), lambda p, s, t, k: sgd_steps(p, s[0], k, False),
    ),
    "nesterov_steps": (
        optim.multi_step(optim.sgd(LR, U, W, nesterov=True)),
        lambda p, s, t, k: sgd_steps(p, s[0], k, True),
    ),
    "adam_steps": (
        optim.multi_step(optim.adam(LR, BETAS, EPS, W)),
        lambda p, s, t, k: adam_steps(p, *s, t, k, W, False),
    ),
    "adamw_steps": (
        optim.multi_step(optim.adamw(LR, BETAS, EPS, W)),
        lambda p, s, t, k: adam_steps(p, *s, t, k, W, True),
    ),
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", PREDICTING)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def predict(rule: Optimizer, param: Any, state: Any, step: int, ahead: int) -> torch.Tensor:
    assert rule.predict is not None
    return rule.predict(param, state, scalar(step), scalar(LR), scalar(ahead))


def train(rule: Optimizer, param: Any, state: Any, steps: range, gradient: Any) -> Any:
    for step in steps:
        param, state = rule.update(param, gradient, state, scalar(step), scalar(LR))
    return param, state


def random_state(rule: Optimizer) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    param, *state = (torch.randn(4, 3, dtype=torch.float64) for _ in range(1 + len(rule.state)))
    named = zip(rule.state, state, strict=True)
    return param, tuple(v.abs() if name == "square" else v for name, v in named)


@NAMES
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_formula(name: str, ahead: int) -> None:
    rule, formula = PREDICTING[name]
    param, state = random_state(rule)
    found = predict(rule, param, state, 5, ahead)
    expected = formula(param.numpy(), [tensor.numpy() for tensor in state], 5, ahead)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
    assert torch.equal(found, param) == (ahead == 0)


@NAMES
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_nothing_is_predicted_before_the_first_update(name: str, eps: float) -> None:
    rule, _ = PREDICTING[name]
    if name.startswith("adam"):
        rule = getattr(optim, name.partition("_")[0])(LR, BETAS, eps, W)
        rule = optim.multi_step(rule) if name.endswith("steps") else rule
    elif name == "lamb":
        rule = optim.lamb(LR, BETAS, eps, W)
    param, state = random_state(rule)
    assert torch.equal(predict(rule, param, tuple(map(torch.zeros_like, state)), 0, 3), param)


@NAMES
def test_predicted_weights_are_nearer_to_later_weights(name: str) -> None:
    """Train 20 updates with one constant gradient, then predict 3 more."""
    rule, _ = PREDICTING[name]
    param, state = random_state(rule)
    gradient = torch.randn_like(param)
    param, state = train(rule, param, tuple(map(torch.zeros_like, state)), range(1, 21), gradient)
    later, _ = train(rule, param, state, range(21, 24), gradient)
    error = float((predict(rule, param, state, 20, 3) - later).norm())
    distance = float((param - later).norm())
    assert error < 0.75 * distance if name.endswith("steps") else error < 0.25 * distance


@pytest.mark.parametrize("nesterov", [False, True])
def test_multi_step_is_exact_if_gradients_vanish(nesterov: bool) -> None:
    """SGD without decay coasts on its momentum while gradients vanish."""
    rule = optim.multi_step(optim.sgd(LR, U, nesterov=nesterov))
    param, state = random_state(rule)
    later, _ = train(rule, param, state, range(6, 11), torch.zeros_like(param))
    torch.testing.assert_close(predict(rule, param, state, 5, 5), later, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [optim.adam, optim.adamw])
def test_multi_step_is_nearer_where_gradients_vanish(make: Callable[..., Optimizer]) -> None:
    rule = make(LR, BETAS, EPS, W)
    param, state = random_state(rule)
    later, _ = train(rule, param, state, range(21, 26), torch.zeros_like(param))
    found = [predict(r, param, state, 20, 5) for r in (rule, optim.multi_step(rule))]
    once, steps = (float((prediction - later).norm()) for prediction in found)
    assert steps < 0.5 * once


def test_rules_without_a_direction_predict_nothing() -> None:
    shapes = {"a": torch.empty(3)}
    for rule in (optim.sgd(LR), optim.rmsprop(LR), optim.adagrad(LR)):
        assert rule.predict is None
        assert trace_predict(rule, shapes, Formulas({})) is None
        with pytest.raises(HetpipeError, match="has no multi-step prediction"):
            optim.multi_step(rule)
    assert trace_predict(optim.adam(), {}, Formulas({})) is None


def test_multi_step_keeps_exclusions() -> None:
    excluding = optim.multi_step(optim.adamw(LR, weight_decay=W, decay_exclude="b".__eq__))
    param, state = random_state(excluding)
    for name, decay in (("a", W), ("b", 0.0)):
        plain = optim.multi_step(optim.adamw(LR, weight_decay=decay))
        expected = predict(plain, param, state, 5, 3)
        assert torch.equal(predict(excluding.rule_for(name), param, state, 5, 3), expected)


@pytest.mark.parametrize("table", TABLES)
@NAMES
def test_program_equals_rule(name: str, table: str) -> None:
    check_program(PREDICTING[name][0], TABLES[table])


def test_program_applies_exclusions() -> None:
    check_program(optim.lamb(LR, BETAS, EPS, W, decay_exclude="b".__eq__), {})


def check_program(rule: Optimizer, table: Any) -> None:
    param, state = random_state(rule)
    tensors = {"a": param.float(), "b": param[0].float()}
    env: Env = {(PARAM, n): v for n, v in tensors.items()}
    for slot, value in zip(rule.state, state, strict=True):
        env[STATE, f"{slot}/a"], env[STATE, f"{slot}/b"] = value.float(), value[0].float()
    for key, number in {"lr": LR, "step": 5.0, "ahead": 3.0}.items():
        env[SCALAR, key] = torch.tensor(number)
    program = trace_predict(rule, tensors, Formulas(table))
    assert program is not None
    assert {slot.role for slot in program.inputs} <= {PARAM, STATE, SCALAR}
    found = run(program, env)
    assert list(found) == [(PARAM, "a"), (PARAM, "b")]
    for n, p, s in (("a", param, state), ("b", param[0], tuple(v[0] for v in state))):
        expected = predict(rule.rule_for(n), p, s, 5, 3).float()
        torch.testing.assert_close(found[PARAM, n], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("table", TABLES)
def test_norm(table: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gradients = {"a": torch.randn(4, 3, dtype=dtype), "b": torch.randn(7, dtype=dtype)}
    gradients["c"] = torch.randn((), dtype=dtype)
    program = trace_norm(gradients, Formulas(TABLES[table]))
    assert program is not None
    env: Env = {(GRAD, n): v for n, v in gradients.items()}
    env[SCALAR, "grad_scale"] = torch.tensor(0.25, dtype=dtype)
    found = run(program, env)
    assert list(found) == [(NORM, "square")]
    square = found[NORM, "square"]
    expected = sum(float((g.double() / 4).square().sum()) for g in gradients.values())
    assert (square.dtype, square.shape) == (dtype, ())
    assert abs(float(square) - expected) < 1e-6 * expected
    assert trace_norm({}, Formulas(TABLES[table])) is None


def test_stages_predict_and_measure_the_parameters_that_they_own() -> None:
    """Only the first stage owns the tied weight."""
    model, tables = captured("tied"), [{}, TABLES["core"]]
    stages = model.stage_graphs([1], tables, [4], optim.adam())
    owned: list[str] = []
    for stage in stages:
        updated = _names(stage.update and stage.update.outputs, PARAM)
        assert updated == _names(stage.predict and stage.predict.outputs, PARAM)
        assert updated == _names(stage.norm and stage.norm.inputs, GRAD)
        owned += updated
    assert stages[1].tied[0][0] in owned
    assert sorted(owned) == sorted(model.parameters)
    for stage in model.stage_graphs([1], tables, [4], optim.sgd(LR)):
        assert stage.predict is None
        assert stage.norm is not None
    for stage in model.stage_graphs([1], tables, [4], None):
        assert stage.update is stage.predict is stage.norm is None


def _names(slots: Any, role: str) -> list[str]:
    return [slot.name for slot in slots if slot.role == role]
