"""A step compared with torch: which steps count as equal, and which tensors float32 cannot
determine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe import optim
from hetpipe.bench import filed as filed_module
from hetpipe.bench import judge
from hetpipe.bench.filed import Filed
from hetpipe.bench.judge import (
    GRADIENT_LIMIT,
    Errors,
    gradient_errors,
    step_of_torch,
    steps_in_float32,
    without_dropout,
)
from hetpipe.bench.parity import Parity, parity
from hetpipe.check.device import ExactDevice, RoundingDevice
from hetpipe.errors import PlanError
from hetpipe.sdk.host.registry import open_device
from hetpipe.train.eager import torch_optimizer
from hetpipe.zoo.load import load_workload
from hetpipe.zoo.workload import Workload


def workload(model: nn.Module, x: torch.Tensor, outputs: int) -> Workload:
    def batches(samples: int, seed: int) -> Any:
        while True:
            yield x[:samples], torch.arange(samples) % outputs

    return Workload(model, nn.functional.cross_entropy, batches, "own", 4, optim.sgd(lr=0.1))


def test_errors_are_relative_to_each_tensor() -> None:
    right = {"large": torch.full((4,), 100.0), "tiny": torch.full((4,), 1e-5)}
    found = {"large": torch.full((4,), 100.01), "tiny": torch.full((4,), 1.1e-5)}
    errors = gradient_errors(found, right)
    assert errors["large"] == pytest.approx(1e-4, rel=1e-2)
    assert errors["tiny"] == pytest.approx(0.1, rel=1e-3)


def test_the_error_of_a_zero_gradient_is_relative_to_all_gradients() -> None:
    right = {"weight": torch.full((4,), 3.0), "bias": torch.full((4,), 1e-17)}
    noise, wrong = torch.full((4,), 3e-7), torch.full((4,), 0.3)
    assert gradient_errors({**right, "bias": noise}, right)["bias"] < 2e-7
    errors = gradient_errors({**right, "bias": wrong}, right)
    assert errors["bias"] == pytest.approx(0.1, rel=1e-3)


def test_missing_and_non_finite_gradients_have_infinite_error() -> None:
    right = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "none": torch.zeros(2)}
    found = {"b": torch.tensor([1.0, math.nan]), "c": torch.ones(2), "more": torch.ones(2)}
    assert gradient_errors(found, right) == {
        "a": math.inf, "b": math.inf, "c": 0.0, "more": math.inf, "none": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("part", ["loss", "gradient", "update"])
def test_each_part_must_be_equal(part: str) -> None:
    errors = Errors(1e-7, 1e-6, "w", 3, 1e-8)
    row = Parity("m", "d", 4, 10, 0.1, {}, {}, errors)
    assert row.is_strict
    assert row.is_equal
    for value in (2e-3, math.nan):
        wrong: dict[str, Any] = {part: value}
        assert not replace(row, errors=replace(errors, **wrong)).is_equal
    assert not replace(row, errors=None).is_equal


GOOD = Errors(1e-7, 1e-6, "w", 3, 1e-8)
BEYOND = replace(GOOD, gradient=2e-2)
OWN = replace(GOOD, gradient=1e-2)
"""Errors of torch's own step in float32."""


def row_of(errors: Errors, **more: Any) -> Parity:
    return Parity("m", "d", 4, 10, 0.1, {}, {}, errors, **more)


def test_a_nearly_equal_model_is_judged_by_its_layers() -> None:
    row = row_of(BEYOND, torch=OWN, layers=GOOD)
    assert row.verdict == "by layers"
    for errors in (replace(GOOD, gradient=5e-2), replace(BEYOND, loss=1e-3)):
        assert replace(row, errors=errors).verdict == "no"
    for part in ("gradient", "crossing"):
        wrong: dict[str, Any] = {part: 2e-3}
        assert replace(row, layers=replace(GOOD, **wrong)).verdict == "no"
    assert replace(row, layers=None).verdict == "no"


def test_a_loss_may_differ_where_torch_in_float32_differs() -> None:
    row = row_of(replace(BEYOND, loss=3e-3), torch=replace(OWN, loss=1e-3), layers=GOOD)
    assert row.is_equal
    for loss in (9e-5, 5e-4):
        assert not replace(row, torch=replace(OWN, loss=loss)).is_equal
    assert not replace(row, layers=replace(GOOD, loss=2e-4)).is_equal
    assert not replace(row, errors=replace(BEYOND, update=1e-4)).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("device", ["pytorch:cpu:0", "numpy:cpu:0"])
@pytest.mark.parametrize("name", ["mlp", "residual-lstm-small"])
def test_a_correct_device_is_equal(device: str, name: str) -> None:
    row = parity(load_workload(name), open_device(device))
    assert row.is_strict, row
    assert not row.refused


class Crossing(nn.Module):
    """A model whose first and last layer share a weight, with a skip connection and a batch norm
    between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = self.second(torch.tanh(self.norm(self.first(x))))
        logits: torch.Tensor = self.head(torch.tanh(x + y))
        return logits


def summed_loss(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = nn.functional.cross_entropy(logits, y, reduction="sum")
    return loss, torch.ones_like(y).sum()


@pytest.mark.slow
def test_stages_in_sequence_equal_the_whole_model() -> None:
    torch.manual_seed(0)
    own = replace(workload(Crossing(), torch.tensor([5, 0, 5, 6]), 7), loss_fn=summed_loss)
    row = parity(own, open_device("numpy:cpu:0"), stages=4)
    assert row.is_strict, row
    assert row.errors is not None
    assert row.errors.tensors == 7
    assert row.stages == 4


def test_more_stages_than_layers_are_refused() -> None:
    small = workload(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.ones(4, 3), 2
    )
    with pytest.raises(PlanError, match="2 layers cannot make 9 stages"):
        parity(small, open_device("pytorch:cpu:0"), stages=9)


def test_a_step_of_torch_leaves_the_model_unchanged() -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = workload(model, torch.randn(4, 3), 2)
    step = step_of_torch(own, model, next(own.batches(4, 0)), torch.float64)
    assert step.gradients.keys() == dict(model.named_parameters()).keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    assert first.weight.grad is not None, "no hook stays"


def test_an_update_is_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, gradient = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    rule = optim.adamw(lr=0.1)
    right = nn.Parameter(parameter.double())
    right.grad = gradient.double()
    torch_optimizer(rule, {"w": right}).step()
    new = right.detach() + torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-3])
    expected = 1e-3 / float(right.detach().norm())
    for piece in (10, 2):
        monkeypatch.setattr(judge, "PIECE", piece)
        found = judge.update_error(rule, "w", parameter, gradient, new)
        assert found == pytest.approx(expected, rel=1e-6)
    assert judge.update_error(rule, "w", parameter, gradient, new * math.nan) == math.inf


@pytest.mark.slow
def test_a_wrong_gradient_is_found() -> None:
    """Use a model that torch runs with 0.9 times its weight, and that is captured with all of
    it."""

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight if torch.compiler.is_exporting() else 0.9 * self.weight
            return nn.functional.linear(x, weight, self.bias)

    torch.manual_seed(0)
    row = parity(workload(Two(3, 2), torch.randn(4, 3), 2), open_device("pytorch:cpu:0"))
    assert row.errors is not None
    assert not row.is_equal
    assert row.errors.gradient > 10 * GRADIENT_LIMIT
    assert row.errors.worst in ("weight", "bias")


class Close(nn.Module):
    """A model with a hidden element of 2^-30, of small weight, which float32 rounds to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        with torch.no_grad():
            self.first.weight[0] = torch.tensor([1.0, 2.0**-30, -1.0])
            self.first.bias.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0]))
            self.second.weight[:, 0] = torch.tensor([0.01, -0.01])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.relu(self.first(x)))
        return logits


@pytest.mark.slow
def test_decisions_within_rounding_are_judged_layer_by_layer() -> None:
    torch.manual_seed(0)
    row = parity(workload(Close(), torch.ones(4, 3), 2), open_device("numpy:cpu:0"))
    assert row.errors is not None
    assert GRADIENT_LIMIT < row.errors.gradient < 0.1
    assert row.torch is not None
    assert row.torch.gradient == pytest.approx(row.errors.gradient, rel=1e-2)
    assert row.layers is not None
    assert set(row.layers.undetermined) <= {"first.weight", "first.bias", "second.weight"}
    assert row.layers.gradient < 1e-5
    assert row.verdict == "by layers"


@pytest.mark.slow
def test_a_device_must_be_right_where_torch_in_float32_is() -> None:
    """The gradient is off by 1 %, as it may be where rounding changes decisions."""

    class Slightly(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 if torch.compiler.is_exporting() else 0.99
            y = nn.functional.linear(x, self.weight, self.bias)
            return y.detach() + scale * (y - y.detach())

    torch.manual_seed(0)
    row = parity(workload(Slightly(3, 2), torch.randn(4, 3), 2), open_device("pytorch:cpu:0"))
    assert row.errors is not None
    assert row.errors.gradient == pytest.approx(1e-2, rel=0.1)
    assert row.layers is None, "torch's float32 is right"
    assert not row.is_equal


PAIRS = 32


class Cancelling(nn.Module):
    """A model whose first weight has a small sum of large terms as gradient, with rounding
    errors.

    The last hidden unit is zero and has weights of about 3000 to both classes, so its tangent is
    the small difference of large products. Samples come in pairs with opposite labels, whose
    tangents cancel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4, bias=False), nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.first.weight *= 0.1
            self.first.weight[3] = 0.0
            self.second.weight[:, 3] += 3000.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.first(x))
        return logits


def cancelling(model: type[nn.Module] = Cancelling) -> Workload:
    torch.manual_seed(0)
    x = torch.randn(PAIRS, 16).repeat_interleave(2, 0)
    return replace(workload(model(), x, 2), mini_batch=2 * PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["pytorch:cpu:0", "numpy:cpu:0"])
def test_cancellation_is_judged_layer_by_layer(device: str) -> None:
    row = parity(cancelling(), open_device(device), 2 * PAIRS)
    assert row.errors is not None
    assert row.torch is not None
    assert min(row.errors.gradient, row.torch.gradient) > GRADIENT_LIMIT
    assert row.layers is not None
    assert row.layers.gradient < 1e-5
    assert 0 < row.layers.crossing < GRADIENT_LIMIT
    assert row.verdict == "by layers"


@pytest.mark.slow
def test_a_layer_with_a_wrong_gradient_is_refused() -> None:
    """The gradient is off by 0.2 %, a fraction of the error of torch's own float32 step."""

    class Slightly(Cancelling):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 if torch.compiler.is_exporting() else 0.998
            h = self.first(x)
            logits: torch.Tensor = self.second(h.detach() + scale * (h - h.detach()))
            return logits

    row = parity(cancelling(Slightly), open_device("pytorch:cpu:0"), 2 * PAIRS)
    assert row.errors is not None
    assert row.torch is not None
    assert row.errors.within(4 * row.torch.gradient), "not seen in the whole model"
    assert row.layers is not None
    assert row.layers.gradient == pytest.approx(2e-3, rel=0.1)
    assert row.verdict == "no"


class Exact(ExactDevice):
    """The exact device, under the name of an installed backend, so that its operators count."""

    info = replace(ExactDevice.info, backend="pytorch")


@pytest.mark.slow
def test_the_exact_device_rounds_only_results() -> None:
    row = parity(cancelling(), Exact(), 2 * PAIRS, stages=2)
    assert row.errors is not None
    assert row.errors.gradient < 1e-6
    assert row.verdict == "strict"


@pytest.mark.slow
def test_a_wrong_tangent_at_a_cut_is_refused() -> None:
    class Off(Exact):
        """A device whose tensors at the cut are off by 0.2 %."""

        def _run(self, program: Any, inputs: Any, donate: frozenset[int]) -> list[Any]:
            results = super()._run(program, inputs, donate)
            for result in results:
                if result.shape == (2 * PAIRS, 4):
                    result.tensor *= 1.002
            return results

    row = parity(cancelling(), Off(), 2 * PAIRS, stages=2)
    assert row.errors is not None
    assert row.torch is not None
    assert GRADIENT_LIMIT < row.errors.gradient < row.torch.gradient
    assert row.layers is not None
    assert row.layers.gradient < 1e-5
    assert row.layers.crossing == pytest.approx(2e-3, rel=0.1)
    assert row.verdict == "no"


class Chaotic(nn.Module):
    """A model whose layers each multiply errors by about 20."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(40 * layer(x))
        logits: torch.Tensor = self.last(torch.relu(x))
        return logits


def chaotic(model: type[nn.Module] = Chaotic) -> Workload:
    torch.manual_seed(0)
    return workload(model(), torch.randn(4, 8), 2)


@pytest.mark.slow
def test_a_chaotic_model_is_judged_layer_by_layer() -> None:
    row = parity(chaotic(), open_device("numpy:cpu:0"))
    assert row.errors is not None
    assert row.errors.loss > 1e-2
    assert row.layers is not None
    assert row.layers.gradient < 1e-4
    assert row.verdict == "by layers"


@pytest.mark.slow
def test_a_wrong_layer_of_a_chaotic_model_is_refused() -> None:
    class Slightly(Chaotic):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 if torch.compiler.is_exporting() else 0.997
            h = super().forward(x)
            return h.detach() + scale * (h - h.detach())

    row = parity(chaotic(Slightly), open_device("numpy:cpu:0"))
    assert row.is_near, "not seen in the whole model"
    assert row.verdict == "no"


@pytest.mark.parametrize("amplifies", [True, False])
def test_steps_in_float32_show_how_far_rounding_moves_a_loss(amplifies: bool) -> None:
    own = chaotic() if amplifies else cancelling()
    batch = next(own.batches(4, 0))
    right = step_of_torch(own, own.model, batch, torch.float64).loss
    losses = [step.loss for step in steps_in_float32(own, own.model, batch)]
    worst = max(abs(loss / right - 1) for loss in losses)
    assert worst > 1e-3 if amplifies else worst < 1e-5
    assert not any(module._forward_hooks for module in own.model.modules())


class Undone(nn.Module):
    """A model whose second norm undoes the scale of the first, so that large terms cancel in the
    gradient of the first norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4, eps=1e-9), nn.BatchNorm1d(4, eps=1e-9)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.sin(self.second(torch.relu(self.first(x)))))
        return logits


def undone(model: type[nn.Module] = Undone) -> Workload:
    torch.manual_seed(0)
    return replace(workload(model(), torch.randn(64, 4), 2), mini_batch=64)


@pytest.mark.slow
def test_a_cancelled_gradient_is_compared_with_torch_in_float32() -> None:
    row = parity(undone(), open_device("numpy:cpu:0"), 64)
    assert row.layers is not None, row
    assert row.layers.undetermined == ("first.weight",)
    assert row.layers.gradient < 1e-4
    assert row.verdict == "by layers"


class Tied(nn.Module):
    """A model with a window of elements that are equal in float32 and not in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 4), nn.Linear(2, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-30], [0.5, 1], [1, 1]]))
            self.first.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.first(x).view(-1, 1, 2, 2)
        logits: torch.Tensor = self.head(nn.functional.max_pool2d(image, (1, 2)).flatten(1))
        return logits


@pytest.mark.slow
def test_maxima_equal_in_float32_are_compared_with_torch_in_float32() -> None:
    torch.manual_seed(0)
    row = parity(workload(Tied(), torch.ones(4, 2), 2), open_device("numpy:cpu:0"))
    assert row.errors is not None
    assert row.errors.gradient > GRADIENT_LIMIT
    assert row.layers is not None
    assert row.layers.passed == 1
    assert row.layers.crossing < 1e-5
    assert row.verdict == "by layers"


@pytest.mark.slow
def test_the_rounding_device_errs_where_torch_errs() -> None:
    class Rounding(RoundingDevice):
        info = Exact.info

    row = parity(cancelling(), Rounding(), 2 * PAIRS)
    assert row.errors is not None
    assert row.torch is not None
    assert row.errors.gradient > GRADIENT_LIMIT
    assert row.verdict == "by layers"


def test_filed_tensors_are_read_back_unchanged() -> None:
    filed = Filed()
    tensors = {"a": torch.randn(3, 4).T, "b": torch.tensor(2.5), "c": torch.empty(0, 2),
               "d": torch.tensor([True, False]), "e": torch.arange(5)}  # fmt: skip
    for name, tensor in tensors.items():
        filed.file(name, tensor)
    assert list(filed) == list(tensors)
    for name in reversed(tensors):
        assert torch.equal(filed[name], tensors[name])
        assert filed[name].dtype == tensors[name].dtype


def test_filed_activations_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_workload("bert48-small")
    model = without_dropout(own.model)
    batch = next(own.batches(2, 0))
    usual = step_of_torch(own, model, batch, torch.float64)
    monkeypatch.setattr(filed_module, "LARGE_PARAMETERS", 0)
    monkeypatch.setattr(filed_module, "LARGE_NBYTES", 1)
    step = step_of_torch(own, model, batch, torch.float64)
    assert step.loss == usual.loss
    assert all(torch.equal(step.gradients[name], usual.gradients[name]) for name in usual.gradients)


def test_dropout_is_off_in_a_copy() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.LSTM(3, 4, num_layers=2, dropout=0.5))
    plain = without_dropout(model)
    assert [plain[0].p, plain[1].dropout] == [0.0, 0.0]
    assert [model[0].p, model[1].dropout] == [0.5, 0.5]
    assert plain.training
