"""A model's smooth twin: the same network without decisions.

A rectifier and a maximum decide by a comparison. Of millions of elements some lie within rounding
of it, and there any two correct programs may differ: by a share s of the elements, and so by about
the root of s in a gradient's norm, be the error of the values as small as it may. The twin has the
sigmoid-weighted unit in place of rectifiers and means in place of maxima. Its gradients differ by
no more than a program's rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hetpipe.bench.shared import with_same_parameters

Function = Callable[..., Any]


def _silu(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return functional.silu(x)


def _sigmoid(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.sigmoid(x)


def _mean_pool2d(
    x: torch.Tensor, size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> torch.Tensor:  # fmt: skip
    return functional.avg_pool2d(x, size, stride, padding, ceil_mode)


_SMOOTH: dict[Any, Function] = {
    **dict.fromkeys((torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_), _silu),
    **dict.fromkeys((functional.relu, functional.relu6, functional.hardtanh), _silu),
    **dict.fromkeys((functional.leaky_relu, functional.hardswish), _silu),
    functional.hardsigmoid: _sigmoid,
    **dict.fromkeys((torch.max_pool2d, functional.max_pool2d), _mean_pool2d),
}


class Decisions(TorchFunctionMode):
    """Notes whether a function that decides is called."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.any = self.any or func in _SMOOTH
        return func(*args, **(kwargs or {}))


class _Mode(TorchFunctionMode):
    """Calls the smooth function in place of one that decides."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _SMOOTH.get(func, func)(*args, **(kwargs or {}))


class _Smooth(nn.Module):
    """Comes before a model's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Mode():
            return super().forward(*args, **kwargs)


def smooth_twin(model: nn.Module) -> nn.Module:
    """A copy of the model, with its own parameters, without rectifiers and maxima."""
    twin = with_same_parameters(model)
    twin.__class__ = type(type(model).__name__, (_Smooth, type(model)), {})
    return twin
