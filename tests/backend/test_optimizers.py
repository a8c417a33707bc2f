"""Updates, predictions and norms on every device of this machine, against the rules in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_devices import infos, opened, run

from hetpipe import optim
from hetpipe.capture.passes.update_programs import Formulas, trace_norm, trace_predict, trace_update
from hetpipe.capture.program import GRAD, NORM, PARAM, SCALAR, STATE, Program
from hetpipe.optim import Optimizer
from hetpipe.optim.average import with_average
from hetpipe.sdk.host.registry import get_backend

DEVICES = {info.id: info.backend for info in infos()}
SHAPES = {"a": torch.empty(33, 7), "b": torch.empty(5)}
SCALARS = {"lr": 0.03125, "step": 5.0, "grad_scale": 0.25, "ahead": 3.0}
RULES = {
    "momentum": optim.sgd(momentum=0.9, weight_decay=0.1, lr=0.1),
    "momentum_steps": optim.multi_step(optim.sgd(momentum=0.9, weight_decay=0.1, lr=0.1)),
    "adam_steps": optim.multi_step(optim.adam(weight_decay=0.1)),
    "adamw": optim.adamw(),
    "adamw_steps": optim.multi_step(optim.adamw()),
    "amsgrad": optim.adamw(amsgrad=True, maximize=True),
    "nadam": optim.nadam(weight_decay=0.1),
    "adamax": optim.adamax(weight_decay=0.1),
    "dampening": optim.sgd(momentum=0.9, dampening=0.5, lr=0.1, maximize=True),
    "rmsprop": optim.rmsprop(momentum=0.9),
    "centered": optim.rmsprop(centered=True),
    "adagrad": optim.adagrad(),
    "adagrad_decay": optim.adagrad(lr_decay=0.1, initial_accumulator_value=0.5),
    "adadelta": optim.adadelta(weight_decay=0.1),
    "lion": optim.lion(weight_decay=0.1),
    "lamb": optim.lamb(),
    "averaged": with_average(optim.adamw(), 0.75),
}
VALID: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("sum", "moved", "largest"), torch.abs),
    "mean": torch.tanh,
    "square": lambda value: value.square() + 1,  # RMSprop subtracts the square of the mean
    "faded": torch.sigmoid,
}
"""By slot, a function from any numbers to numbers that a state may have."""
Env = dict[tuple[str, str], torch.Tensor]


def environment(rule: Optimizer) -> Env:
    generator = torch.Generator().manual_seed(0)
    env: Env = {(SCALAR, name): torch.tensor(value) for name, value in SCALARS.items()}
    for name, shape in SHAPES.items():
        for key in ((PARAM, name), (GRAD, name)):
            env[key] = torch.randn(shape.shape, generator=generator)
        for slot in rule.state:
            value = torch.randn(shape.shape, generator=generator)
            env[STATE, f"{slot}/{name}"] = VALID.get(slot, torch.clone)(value)
    return env


def check(device_id: str, program: Program | None, env: Env, expected: Callable[..., Any]) -> None:
    """Run a program and compare each output with `expected(role, name)`, which is float64."""
    assert program is not None
    inputs = [env[slot.key].numpy() for slot in program.inputs]
    arrays = run(opened(device_id), program.graph, inputs)
    for slot, array in zip(program.outputs, arrays, strict=True):
        found, wide = torch.from_numpy(array), expected(*slot.key)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wide, rtol=4e-6, atol=4e-6, msg=str(slot))


def values_of(rule: Optimizer, env: Env, name: str) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return one parameter's values in float64 by role or scalar name, and its state."""
    values = {role: env[role, name].double() for role in (PARAM, GRAD)}
    values |= {scalar: env[SCALAR, scalar].double() for scalar in SCALARS}
    return values, tuple(env[STATE, f"{slot}/{name}"].double() for slot in rule.state)


@pytest.mark.wide
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("device_id", DEVICES)
def test_update(device_id: str, name: str) -> None:
    rule = RULES[name]
    env = environment(rule)

    def expected(role: str, key: str) -> torch.Tensor:
        slot, _, owner = key.rpartition("/")
        v, state = values_of(rule, env, owner)
        if role == GRAD:
            return torch.zeros_like(v[GRAD])
        param, new = rule.update(v[PARAM], v[GRAD] * v["grad_scale"], state, v["step"], v["lr"])
        return param if role == PARAM else new[rule.state.index(slot)]

    table = get_backend(DEVICES[device_id]).decompositions()
    check(device_id, trace_update(rule, SHAPES, {}, Formulas(table)), env, expected)


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].predict is not None])
@pytest.mark.parametrize("device_id", DEVICES)
def test_prediction(device_id: str, name: str) -> None:
    rule = RULES[name]
    env = environment(rule)

    def expected(_: str, key: str) -> torch.Tensor:
        assert rule.predict is not None
        v, state = values_of(rule, env, key)
        return rule.predict(v[PARAM], state, v["step"], v["lr"], v["ahead"])

    table = get_backend(DEVICES[device_id]).decompositions()
    check(device_id, trace_predict(rule, SHAPES, Formulas(table)), env, expected)


@pytest.mark.parametrize("device_id", DEVICES)
def test_no_prediction_before_the_first_update(device_id: str) -> None:
    """Zero moments divided by zero corrections give no NaN on any device."""
    for rule in (
        optim.adamw(eps=0.0),
        optim.multi_step(optim.adam(weight_decay=0.1)),
        optim.lamb(),
    ):
        env = environment(rule)
        env.update({key: torch.zeros_like(v) for key, v in env.items() if key[0] == STATE})
        env[SCALAR, "step"] = torch.tensor(0.0)
        table = get_backend(DEVICES[device_id]).decompositions()
        program = trace_predict(rule, SHAPES, Formulas(table))
        check(device_id, program, env, lambda role, name, env=env: env[role, name].double())


@pytest.mark.parametrize("device_id", DEVICES)
def test_norm(device_id: str) -> None:
    env = environment(RULES["adagrad"])
    scaled = [env[GRAD, name].double() * SCALARS["grad_scale"] for name in SHAPES]
    square = torch.stack([gradient.square().sum() for gradient in scaled]).sum()
    table = get_backend(DEVICES[device_id]).decompositions()
    expected = {(NORM, "square"): square}
    check(device_id, trace_norm(SHAPES, Formulas(table)), env, lambda *key: expected[key])
