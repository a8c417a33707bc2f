"""Copies of a model for the memory of its modules alone."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_Model = TypeVar("_Model", bound=nn.Module)


def with_same_parameters(model: _Model) -> _Model:
    """A copy with modules and buffers of its own, and the parameters of `model` itself."""
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy of the model, with its own parameters, whose dropout layers and recurrent networks
    drop nothing."""
    model = with_same_parameters(model)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return model
