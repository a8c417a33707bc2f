"""Plain torch as the reference follows learning-rate schedules and exclusions."""

import pytest
import torch
from torch import nn

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.options import UpdateOptions
from hetpipe.train.eager import Eager


def loss_fn(found, wanted):
    return (found - wanted).square().mean()


@pytest.mark.parametrize(
    "rule",
    [
        optim.sgd(lr=lambda step: 0.1 / step, momentum=0.9, nesterov=True),
        optim.adamw(lr=0.1, weight_decay=0.5, decay_exclude=lambda name: name == "bias"),
        optim.adam(lr=0.1, weight_decay=0.5),
        optim.rmsprop(lr=0.1, momentum=0.5),
        optim.adagrad(lr=lambda step: 0.1 * step),
    ],
    ids=lambda rule: rule.name,
)
def test_the_torch_optimizer_matches_the_rule(rule):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {n: tuple(torch.zeros_like(v) for _ in rule.state) for n, v in values.items()}
    eager = Eager(model, loss_fn, rule)
    for step in range(1, 6):
        x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
        eager.step(x, y, [4])
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss_fn(x @ leaves["weight"].t() + leaves["bias"], y).backward()
        for name, leaf in leaves.items():
            values[name], states[name] = rule.rule_for(name).update(
                values[name], leaf.grad, states[name], torch.tensor(float(step)),
                torch.tensor(rule.lr_at(step)),
            )  # fmt: skip
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[name], rtol=1e-5, atol=1e-7)


def test_a_rule_that_torch_lacks_is_refused():
    with pytest.raises(HetpipeError, match="torch has no optimizer 'lion' to compare with"):
        Eager(nn.Linear(1, 1), loss_fn, optim.lion())


def test_gradients_are_accumulated_and_clipped():
    """Two mini-batches and an update with a clip are one mini-batch of both, clipped."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    other.load_state_dict(model.state_dict())
    rule = optim.sgd(lr=0.1, momentum=0.9)
    eager = Eager(model, loss_fn, rule, UpdateOptions(clip_norm=0.5, accumulate=2))
    whole = Eager(other, loss_fn, rule, UpdateOptions(clip_norm=0.5))
    for _ in range(3):
        x, y = torch.randn(8, 3).double(), 9 * torch.randn(8, 2).double()
        before = model.weight.detach().clone()
        eager.step(x[:4], y[:4], [4])
        assert torch.equal(model.weight, before)
        eager.step(x[4:], y[4:], [4])
        whole.step(x, y, [8])
        torch.testing.assert_close(model.weight, other.weight)


def test_another_learning_rate_also_changes_the_parameters_without_decay():
    rule = optim.adamw(lr=0.1, decay_exclude=lambda name: name == "bias").with_lr(0.2)
    assert [rule.rule_for(name).lr for name in ("weight", "bias")] == [0.2, 0.2]
