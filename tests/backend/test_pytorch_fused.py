"""The torch backend's updates for accelerators, run on CPU tensors: few launches, no new memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from benchmarks.operatorcounts import Launches
from hetpipe.backends.pytorch.program import Program

from hetpipe import optim
from hetpipe.capture.passes.late_gradients import drop_zeros
from hetpipe.capture.passes.update_programs import Formulas, trace_update
from hetpipe.capture.program import GRAD, PARAM, SCALAR, STATE
from hetpipe.capture.program import Program as Update
from hetpipe.optim import Optimizer

CPU = torch.device("cpu")
SHAPES = {f"w{i}": torch.empty(33 + i // 2, 32) for i in range(6)}
SHAPES |= {f"b{i}": torch.empty(33 + i // 2) for i in range(6)}
SCALARS = {"lr": 0.03125, "lr.1": 0.0625, "step": 5.0, "grad_scale": 0.25}


def two_groups() -> Optimizer:
    """Return AdamW whose groups have different rates and decays, with the names of `SHAPES`."""
    weights, biases = ([v for k, v in SHAPES.items() if k[0] == kind] for kind in "wb")
    groups = [{"params": weights}, {"params": biases, "lr": 0.5, "weight_decay": 0.0}]
    return optim.from_torch(torch.optim.AdamW(groups)).named(SHAPES)


RULES = {
    "sgd": optim.sgd(lr=0.1),
    "momentum": optim.sgd(lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": optim.sgd(lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(weight_decay=0.1),
    "adamw": optim.adamw(decay_exclude=lambda name: name.startswith("b")),
    "amsgrad": optim.adamw(amsgrad=True),
    "rmsprop": optim.rmsprop(momentum=0.9),
    "adagrad": optim.adagrad(),
    "lion": optim.lion(weight_decay=0.1),
    "groups": two_groups(),
}
MOST = {**dict.fromkeys(RULES, 20), "amsgrad": 21, "groups": 21}
"""The most launches of an update; a group with its own learning rate adds few."""


class Allocations(Launches):  # type: ignore[no-untyped-call]
    """Counts operators, and the bytes of tensors with dimensions in new storage."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.data_ptr(): tensor for tensor in inputs}
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(result, torch.Tensor) and result.ndim:
                if result.data_ptr() not in self._known:
                    self.nbytes += result.nbytes
                self._known[result.data_ptr()] = result
        return results


def values(update: Update) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.tensor(SCALARS[slot.name])
        if slot.role == SCALAR
        else torch.rand(slot.shape, generator=generator) + 0.1
        for slot in update.inputs
    ]


def compiled(update: Update, roles: tuple[str, ...], kernels: str) -> Program:
    donate = frozenset(i for i, slot in enumerate(update.inputs) if slot.role in roles)
    return Program(update.graph, donate, CPU, "test", kernels)


def results(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    new = program.call(inputs)
    return [inputs[~i] if i < 0 else new[i] for i in program.outputs]


def traced(rule: Optimizer, late: bool) -> Update:
    """Trace the update of all parameters, and zeros of a gradient whose parameter is elsewhere."""
    update = trace_update(rule, SHAPES, {"tied": torch.empty(33, 32)}, Formulas({}))
    assert update is not None
    return drop_zeros(update, SHAPES) if late else update


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("late", [False, True])
def test_a_fused_update_equals_the_plain_update(name: str, late: bool) -> None:
    update = traced(RULES[name], late)
    for roles in ((PARAM, GRAD, STATE), (GRAD, STATE)):
        plain, fused = (compiled(update, roles, kind) for kind in ("cpu", "cuda"))
        inputs = values(update)
        found = results(fused, inputs)
        for left, right in zip(found, results(plain, values(update)), strict=True):
            torch.testing.assert_close(left, right, rtol=4e-7, atol=1e-7)
        assert len({tensor.data_ptr() for tensor in found}) == len(found)
        for slot, before, after in zip(update.inputs, values(update), inputs, strict=True):
            assert slot.role in roles or torch.equal(before, after), slot


def counted(name: str, late: bool) -> Allocations:
    """Run a fused update, and return what it launched and allocated."""
    update = traced(RULES[name], late)
    program = compiled(update, (PARAM, GRAD, STATE), "cuda")
    inputs = values(update)
    counts = Allocations(inputs)
    with torch.no_grad(), counts:
        program.call(inputs)
    return counts


@pytest.mark.parametrize("name", [name for name in RULES if name != "rmsprop"])
@pytest.mark.parametrize("late", [False, True])
def test_an_update_has_few_launches(name: str, late: bool) -> None:
    counts = counted(name, late)
    assert counts.names.total() <= MOST[name], counts.names
    if name not in ("adagrad", "lion"):
        assert counts.nbytes == 0


@pytest.mark.parametrize("name", ["adagrad", "rmsprop"])
def test_temporary_results_exist_for_one_block_at_a_time(name: str) -> None:
    names = counted(name, late=True).names
    calls = [call for call in names if call.startswith("_foreach_sqrt")]
    assert calls
    assert sum(names[call] for call in calls) == 2
