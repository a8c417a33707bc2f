"""Copies of a model that share its parameters, and so need little memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_Model = TypeVar("_Model", bound=nn.Module)


def with_same_parameters(model: _Model) -> _Model:
    """Return a copy with new modules and buffers that shares the parameters of `model`."""
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy without dropout that shares the model's parameters."""
    model = with_same_parameters(model)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return model
