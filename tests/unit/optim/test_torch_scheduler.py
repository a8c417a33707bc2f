"""Learning rates of torch's schedulers equal those of torch's loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LRScheduler

from hetpipe.errors import HetpipeError
from hetpipe.optim import from_torch

UPDATES = 300
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def sequential(o: torch.optim.Optimizer) -> LRScheduler:
    parts = [lrs.LinearLR(o, 0.1, total_iters=20), lrs.CosineAnnealingLR(o, 100)]
    return lrs.SequentialLR(o, parts, [20])


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda n: min(1, (n + 1) / 9), lambda n: 0.97**n]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.99),
    "StepLR": lambda o: lrs.StepLR(o, 7, 0.8),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [5, 50, 51], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 13),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 0.9, 40),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.99),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 100, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 40, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 10, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 15, cycle_momentum=False),
    "CyclicLR exp_range": lambda o: lrs.CyclicLR(
        o, 0.01, 0.1, 15, mode="exp_range", gamma=0.99, cycle_momentum=False
    ),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [0.1, 0.7], UPDATES, cycle_momentum=False),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 13), lrs.ExponentialLR(o, 0.99)]
    ),
}


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> Any:
    groups = [{"params": [torch.ones(2, requires_grad=True)]} for _ in range(2)]
    return kind([groups[0], {**groups[1], "lr": 0.03}], lr=0.1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter")
def test_rates_equal_those_of_torchs_loop(name: str) -> None:
    theirs = optimizer()
    scheduler = SCHEDULERS[name](theirs)
    rule = from_torch(theirs, scheduler)
    assert rule.rates_at(50)["lr"] >= 0  # computed ahead, and without any effect on torch's objects
    for number in range(1, UPDATES + 1):
        expected = [group["lr"] for group in theirs.param_groups]
        assert list(rule.rates_at(number).values()) == expected
        theirs.step()
        if number < UPDATES:
            scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_rates_of_the_users_objects_do_not_matter_later() -> None:
    theirs = optimizer(torch.optim.AdamW)
    theirs.param_groups[0]["lr"] = torch.tensor(0.5)
    scheduler = lrs.StepLR(theirs, 1, 0.5)
    rule = from_torch(theirs, scheduler)
    for _ in range(3):
        scheduler.step()
    assert [rule.lr_at(number) for number in (3, 1, 2)] == [0.125, 0.5, 0.25]
    assert float(theirs.param_groups[0]["lr"]) == 0.0625


def test_a_copy_shares_parameters_and_leaves_out_the_state() -> None:
    """A scheduler of a large model needs no second model."""
    theirs = optimizer(torch.optim.Adagrad)
    rate: Any = from_torch(theirs, lrs.ExponentialLR(theirs, 0.5)).lr
    copied = rate.func.__self__._scheduler.optimizer
    assert copied is not theirs
    assert copied.param_groups[0]["params"][0] is theirs.param_groups[0]["params"][0]
    assert not copied.state
    assert theirs.state


class OfDecay(lrs.StepLR):
    """A scheduler that changes the weight decay."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.last_epoch * 0.1


def test_rates_that_a_scheduler_lacks_are_refused() -> None:
    theirs = optimizer()
    rule = from_torch(theirs, lrs.OneCycleLR(theirs, 0.1, 10, cycle_momentum=False))
    assert rule.lr_at(11) > 0
    with pytest.raises(HetpipeError, match="OneCycleLR has no learning rate for update 12: Tried"):
        rule.lr_at(12)
    theirs = optimizer()
    rule = from_torch(theirs, OfDecay(theirs, 3))
    with pytest.raises(HetpipeError, match="OfDecay changes other settings than the learning rate"):
        rule.lr_at(2)
    theirs = optimizer()
    rule = from_torch(theirs, lrs.LambdaLR(theirs, lambda n: 1.0 - n))
    with pytest.raises(HetpipeError, match=r"learning rate of update 3 is -0\.1"):
        rule.lr_at(3)


def stepped(o: torch.optim.Optimizer) -> LRScheduler:
    scheduler = lrs.ChainedScheduler([lrs.StepLR(o, 1)])
    o.step()
    scheduler.step()
    return scheduler


def uncopyable(o: torch.optim.Optimizer) -> LRScheduler:
    scheduler: Any = lrs.StepLR(o, 1)
    scheduler.log = (number for number in range(3))  # a generator cannot be copied
    return scheduler  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: 0.1, "scheduler is a float: give a scheduler of torch.optim.lr_scheduler"),
        (lrs.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric at each step, and"),
        (lambda o: lrs.StepLR(optimizer(), 1), "StepLR belongs to another optimizer, a SGD: make"),
        (
            lambda o: lrs.OneCycleLR(o, 0.1, 10),
            "OneCycleLR also changes the momentum: make the optimizer and the scheduler again, "
            "with cycle_momentum=False",
        ),
        (
            lambda o: lrs.SequentialLR(o, [lrs.CyclicLR(o, 0.1, 1), lrs.StepLR(o, 1)], [5]),
            "CyclicLR also changes the momentum",
        ),
        (stepped, "ChainedScheduler has already made 1 steps, but its first learning rate is"),
        (uncopyable, "StepLR cannot be copied, and hetpipe runs a copy of a scheduler (cannot"),
    ],
)
def test_other_schedulers_are_refused_by_name(make: Callable[..., Any], message: str) -> None:
    theirs = optimizer(momentum=0.9)
    with pytest.raises(HetpipeError) as caught:
        from_torch(theirs, make(theirs))
    assert message in str(caught.value)
