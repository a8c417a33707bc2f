"""A copy of a model for the memory of its modules alone."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)


def with_same_parameters(model: _Model) -> _Model:
    """A copy with modules and buffers of its own, and the parameters of `model` itself."""
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)
