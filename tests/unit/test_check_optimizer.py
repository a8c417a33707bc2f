"""Whatever is not an optimizer of hetpipe's is refused with the line to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.optim import check_optimizer

WEIGHTS = [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("value", "described", "cure"),
    [
        (None, "optimizer is None;", "write hp.optim.adamw(lr=1e-3), or another of adagrad, "),
        ("adam", "optimizer is 'adam';", "hp.optim.adamw(lr=1e-3), or"),
        (1e-3, "optimizer is 0.001;", "hp.optim.adamw(lr=1e-3), or"),
        (
            torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, nesterov=True),
            "optimizer is torch.optim.SGD",
            "write hp.optim.sgd(lr=0.1, momentum=0.9, nesterov=True)",
        ),
        (
            torch.optim.AdamW(WEIGHTS, lr=0.02),
            "torch.optim.AdamW",
            "hp.optim.adamw(lr=0.02, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)",
        ),
        (torch.optim.Adam, "torch.optim.Adam,", "hp.optim.adam(lr=1e-3)"),
        (torch.optim.LBFGS(WEIGHTS), "torch.optim.LBFGS", "hp.optim.adamw(lr=1e-3), or another"),
        (optim.sgd, "the function sgd itself", "hp.optim.sgd(lr=1e-3)"),
        (WEIGHTS, "optimizer is a list;", "hp.optim.adamw(lr=1e-3), or"),
        (lambda: None, "optimizer is a function;", "hp.optim.adamw(lr=1e-3), or"),
    ],
)
def test_refused(value: Any, described: str, cure: str) -> None:
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(value)
    assert described in str(caught.value)
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    "theirs",
    [
        torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.Adam(WEIGHTS),
        torch.optim.AdamW(WEIGHTS, weight_decay=0.0),
        torch.optim.RMSprop(WEIGHTS, momentum=0.5),
        torch.optim.Adagrad(WEIGHTS),
    ],
)
def test_the_line_to_write_is_python(theirs: torch.optim.Optimizer) -> None:
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(theirs)
    line = str(caught.value).partition("write hp.")[2]
    ours = eval(line, {"optim": optim})
    assert check_optimizer(ours) is ours
    assert ours.lr == theirs.defaults["lr"]
    assert dict(ours.hyperparameters)["weight_decay"] == theirs.defaults["weight_decay"]
