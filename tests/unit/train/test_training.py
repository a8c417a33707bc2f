"""Comparisons of a training with plain torch's: equal, equal within rounding, or different."""

from __future__ import annotations

import pytest
import torch

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.train.eager import Eager
from hetpipe.train.training import (
    GradientError,
    Step,
    compare,
    disturb_parameters,
    furthest,
    torch_losses,
)
from hetpipe.zoo import Workload, load_workload

STEPS = 5


@pytest.fixture
def workload() -> Workload:
    return load_workload("mlp")


@pytest.fixture
def plan() -> Plan:
    stage = StagePlan(0, 1, ("a",), 1, 1.0, 1.0, 0.0, 0, 1)
    return Plan("mlp", ("all",), (stage,), "1f1b", 64, 4, 1.0, (), "measured", "user")


def steps(workload: Workload, factor: float) -> list[Step]:
    losses = torch_losses(workload, (16,) * 4, STEPS, seed=0)
    return [Step(index, loss * factor, 1.0, loss) for index, loss in enumerate(losses)]


def test_the_same_losses_are_equal(workload: Workload, plan: Plan) -> None:
    found = compare(workload, plan, steps(workload, 1.0 + 1e-6), seed=0)
    assert found is not None
    assert found.equal
    assert str(found) == "equal to unpartitioned torch: 1e-06 (loss, 5 steps)"


@pytest.mark.slow
def test_one_percent_is_a_different_training(workload: Workload, plan: Plan) -> None:
    """The comparison must not run from trained weights, where everything would look like
    rounding."""
    found = compare(workload, plan, steps(workload, 1.01), seed=0)
    assert found is not None
    assert not found.equal
    assert found.rounding < 1e-4
    assert str(found).startswith("differs from unpartitioned torch: 1e-02")


def test_rounding_decides_for_a_training_that_hardly_moves(workload: Workload, plan: Plan) -> None:
    """Losses that differ by 5e-5 are equal only if rounding explains them."""
    found = compare(workload, plan, steps(workload, 1.0 + 5e-5), seed=0)
    assert found is not None
    assert not found.equal
    assert "5e-05 (loss, 5 steps), where rounding makes " in str(found)


@pytest.mark.slow
def test_differences_by_rounding_are_equal(workload: Workload, plan: Plan) -> None:
    """Compare with losses of the same training that had rounding errors in its first weights."""
    disturbed = load_workload("mlp")
    disturb_parameters(disturbed.model, seed=7)
    expected, losses = (torch_losses(w, (16,) * 4, 20, seed=0) for w in (workload, disturbed))
    taken = [
        Step(n, loss, 1.0, right)
        for n, (loss, right) in enumerate(zip(losses, expected, strict=True))
    ]
    found = compare(workload, plan, taken, seed=0)
    assert found is not None
    assert found.difference > 0
    assert found.equal, str(found)


RIGHT = {"weight": torch.tensor([1.0, -2.0]), "bias": torch.tensor([1e-9, 0.0])}
SPREADS = {"weight": 1e-6, "bias": 2e-9}


@pytest.mark.parametrize(
    ("weight", "bias", "name", "is_right"),
    [
        ([1.0, -2.0 - 2e-6], [1e-9, 0.0], "weight", True),
        ([1.0, -1.9], [1e-9, 0.0], "weight", False),
        ([1.0, -2.0], [8e-7, -9e-8], "bias", True),  # zero except for rounding
        ([1.0, -2.0], [1e-3, 0.0], "bias", False),
        ([float("nan"), -2.0], [1e-9, 0.0], "weight", False),
    ],
)
def test_the_gradient_furthest_from_torch_is_found(
    weight: list[float], bias: list[float], name: str, is_right: bool
) -> None:
    actual = {"weight": torch.tensor(weight), "bias": torch.tensor(bias)}
    found = furthest(actual, RIGHT, SPREADS, terms=4)
    assert (found.name, found.is_right) == (name, is_right)


def test_a_missing_gradient_is_wrong() -> None:
    found = furthest({"bias": RIGHT["bias"]}, RIGHT, SPREADS, terms=4)
    assert (found.name, found.error, found.is_right) == ("weight", 1.0, False)


def test_gradients_are_compared_without_losses(workload: Workload, plan: Plan) -> None:
    found = compare(workload, plan, [Step(0, 1.0, 1.0)], 0, GradientError("w", 0.74, 2e-5))
    assert str(found) == (
        "differs from unpartitioned torch: 0.7 (gradient of w, first mini-batch), where rounding "
        "makes 2e-05 at most"
    )


def test_a_training_without_expected_losses_is_not_compared(workload: Workload, plan: Plan) -> None:
    assert compare(workload, plan, [Step(0, 1.0, 1.0)], seed=0) is None


def test_batches_repeat_with_their_seed(workload: Workload) -> None:
    first, again, other = (next(workload.batches(32, seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(HetpipeError, match=r"4096 samples.*2048"):
        next(workload.batches(4096, 0))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [optim.sgd(0.1, momentum=0.9), optim.adam(), optim.adamw()])
def test_micro_batches_do_not_change_plain_training(rule: optim.Optimizer) -> None:
    """Uneven micro-batches, a mean loss and (sum, count) give the same losses."""

    def summed(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.nn.functional.cross_entropy(out, y, reduction="sum"), len(y)

    rows = []
    for loss_fn, count in ((None, 1), (None, 5), (summed, 5)):
        workload = load_workload("mlp")
        eager = Eager(workload.model, loss_fn or workload.loss_fn, rule)
        batches = workload.batches(64, 0)
        rows.append([eager.step(*next(batches), micro_sizes(64, count)) for _ in range(STEPS)])
    assert micro_sizes(64, 5) == (13, 13, 13, 13, 12)
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)
    assert rows[2] == pytest.approx(rows[0], rel=1e-4)


def test_digits_are_split_and_scaled() -> None:
    pytest.importorskip("sklearn")
    from hetpipe.zoo.digits import DigitsNet, load_digits

    x, y, x_held, y_held = load_digits()
    assert (len(x), len(y), len(x_held), len(y_held)) == (1437, 1437, 360, 360)
    assert abs(x.mean().item()) < 1e-4
    assert DigitsNet()(x[:2]).shape == (2, 10)
