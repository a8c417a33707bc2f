"""Decompositions into other aten operators, for operators without a kernel in a backend.

`core_decompositions` leaves most of these operators whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hetpipe.sdk.decompositions import formulas, images, indexing, ordering, special
from hetpipe.sdk.decompositions.convolution import VOLUME_CONVOLUTIONS
from hetpipe.sdk.graph import without

__all__ = ["VOLUME_CONVOLUTIONS", "fallback_decompositions"]

aten = torch.ops.aten
FROM_TORCH = (
    aten._batch_norm_with_update_functional, aten.addmv, aten.as_strided_copy, aten.dist,
    aten.grid_sampler_2d, aten.ldexp, aten.linalg_vector_norm, aten.narrow_copy,
    aten.native_batch_norm, aten.native_group_norm, aten.permute_copy, aten.unbind_copy,
    aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_linear1d,
    aten.upsample_trilinear3d, aten.view_copy,
)  # fmt: skip
"""Operators that torch can decompose, although its table for core ATen lacks most of them."""


def fallback_decompositions(keep: Iterable[str] = ()) -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions of sorting, searching, resizing, special functions and more.

    Add them to `core_decompositions` or `primitive_decompositions`, which decompose the resulting
    operators further. `keep` names the operators that have a kernel, as for `core_decompositions`.
    """
    from torch._decomp import get_decompositions

    table: dict[Any, Callable[..., Any]] = dict(get_decompositions(FROM_TORCH))
    for module in (formulas, images, indexing, ordering, special):
        table |= module.DECOMPOSITIONS
    return without(frozenset(keep), table)
