"""A validation of the zoo leaves every module in its mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hetpipe.zoo.data import accuracy_on
from hetpipe.zoo.text import perplexity_on


def _on_tokens(model: nn.Module) -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    perplexity_on(tokens, tokens)(model)


def _on_rows(model: nn.Module) -> None:
    accuracy_on(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))(model)


@pytest.mark.parametrize("validate", [_on_tokens, _on_rows])
def test_a_frozen_part_stays_in_eval_mode(validate: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[1].eval()
    validate(model)
    assert [module.training for module in model.modules()] == [True, True, False, True]


@pytest.mark.parametrize("validate", [_on_tokens, _on_rows])
def test_modes_are_restored_after_an_error(validate: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        validate(model)
    assert all(module.training for module in model.modules())
