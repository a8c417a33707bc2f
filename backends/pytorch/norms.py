"""Batch norms in training by cuDNN on NVIDIA's cards, where torch's eager mode calls it as well.

cuDNN's backward may read a reserve that its forward wrote, but a graph keeps only the mean and the
inverse standard deviation. So cuDNN computes a norm only if torch says that the reserve is empty,
which is expected for row-major inputs. Both values mean the same in cuDNN, in torch's own kernels
and in compiled ones, so each backward can follow each forward. No card has run this yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_choices: dict[tuple[Any, ...], bool] = {}
"""Whether cuDNN computes a norm, by device, dtype, shape, strides and epsilon of the input."""


def cudnn_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute `aten._native_batch_norm_legit_functional`."""
    if weight is None or not training or not _has_cudnn(x, weight, eps):
        results: tuple[Tensor, ...] = aten._native_batch_norm_legit_functional(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return results
    running = [running_mean.clone(), running_var.clone()]  # cuDNN overwrites them
    return (*_by_cudnn(x, weight, bias, running, momentum, eps), *running)


def cudnn_norm_without_memory(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute `aten._native_batch_norm_legit.no_stats`.

    cuDNN gets running statistics that nobody reads, because torch may keep one plan of cuDNN for
    all norms of a shape, and a plan is with or without statistics.
    """
    if weight is None or not training or not _has_cudnn(x, weight, eps):
        results: tuple[Tensor, ...] = aten._native_batch_norm_legit.no_stats(
            x, weight, bias, training, momentum, eps
        )
        return results
    unread = [torch.empty_like(weight), torch.empty_like(weight)]
    return _by_cudnn(x, weight, bias, unread, momentum, eps)


def cudnn_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    inverse_std: Tensor,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Compute `aten.native_batch_norm_backward`."""
    if weight is None or not training or not _has_cudnn(x, weight, eps):
        results: tuple[Tensor | None, ...] = aten.native_batch_norm_backward(
            grad_y, x, weight, running_mean, running_var, mean, inverse_std, training, eps, wanted
        )
        return results
    # Graphs of half precision may keep both values in float16.
    kept = [each.to(weight.dtype) for each in (mean, inverse_std)]
    reserve = x.new_empty(0, dtype=torch.uint8)
    gradients = aten.cudnn_batch_norm_backward(x, grad_y, weight, None, None, *kept, eps, reserve)
    return tuple(grad if want else None for grad, want in zip(gradients, wanted, strict=True))


def _by_cudnn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running: list[Tensor],
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the norm, the mean and the inverse standard deviation; update `running`.

    The backward does not know whether there is a bias, so cuDNN also computes norms without one.
    """
    bias = torch.zeros_like(weight) if bias is None else bias
    results: tuple[Tensor, ...] = aten.cudnn_batch_norm(
        x, weight, bias, *running, True, momentum, eps
    )
    return results[:3]


def _has_cudnn(x: Tensor, weight: Tensor, eps: float) -> bool:
    """Return whether cuDNN computes a norm in training. torch is asked once for each form of input.

    cuDNN never gets float64, which torch's newer code for cuDNN refuses, nor empty batches and more
    than five dimensions, which its older code refuses too.
    """
    if weight.dtype is not torch.float32 or x.dim() > 5 or x.numel() == 0:
        return False
    key = x.device, x.dtype, x.shape, x.stride(), eps
    if key not in _choices:
        _choices[key] = _is_chosen(x, weight, eps) and _reserve_nbytes(x) == 0
    return _choices[key]


def _is_chosen(x: Tensor, weight: Tensor, eps: float) -> bool:
    """Return whether torch's eager mode calls cuDNN: never for AMD's cards, bfloat16 or matrices.

    torch reads only whether there are a bias and statistics, so the weight stands for them.
    """
    others = [weight] * 3
    chosen = torch._C._select_batch_norm_backend(x, weight, *others, True, eps)
    return chosen.name == "Cudnn"


def _reserve_nbytes(x: Tensor) -> int:
    nbytes: int = torch._C._get_cudnn_batch_norm_reserve_space_size(x, True)  # type: ignore[attr-defined]
    return nbytes
