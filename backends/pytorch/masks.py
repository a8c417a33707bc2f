"""Computes dropout's masks: the bits of `hetpipe.keep_mask` by fewer operators, or by one kernel.

On accelerators a Triton kernel computes a whole mask. Without Triton, and on CPUs, a formula of
about 120 operators does; it lets products wrap at 64 bits, where the decomposition for other
backends splits them.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetpipe.sdk.operators.random import MASK, MULTIPLIERS, ROUNDS, WEYL

log = logging.getLogger(__name__)

_BITS = 24
"""Bits of a drawn number."""


def keep_mask(
    rng: Tensor, site: int, size: list[int], keep: float, batch_dim: int, samples: int
) -> Tensor:
    """Compute `hetpipe.keep_mask` by operators of torch."""
    seed, step, first_sample = rng.unbind()
    moved = [size[batch_dim], *size[:batch_dim], *size[batch_dim + 1 :]]
    elements = math.prod(moved) // samples
    c0 = torch.arange((elements + 3) // 4, device=rng.device)
    c1 = (first_sample + torch.arange(samples, device=rng.device).unsqueeze(1)) & MASK
    c2, c3 = torch.full((), site & MASK, dtype=torch.int64, device=rng.device), step
    rounds = torch.arange(ROUNDS, device=rng.device)
    keys0 = (seed + WEYL[0] * rounds).unbind()
    keys1 = ((seed >> 32) + WEYL[1] * rounds).unbind()
    for k0, k1 in zip(keys0, keys1, strict=True):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        # The high half of a product is right modulo 2^32, even if the product wrapped.
        c0 = ((product1 >> 32) ^ (c1 ^ k0)) & MASK
        c2 = ((product0 >> 32) ^ (c3 ^ k1)) & MASK
        c1, c3 = product1, product0  # only their low halves count
    bound = limit(keep) << (32 - _BITS)
    kept = torch.stack([c0 < bound, (c1 & MASK) < bound, c2 < bound, (c3 & MASK) < bound], -1)
    return kept.view(samples, -1)[:, :elements].reshape(moved).movedim(0, batch_dim).contiguous()


def limit(keep: float) -> int:
    """Return n, so that a number is kept if its integer in [0, 2^24) is less than n.

    `hetpipe.keep_mask` compares in float32.
    """
    bound: float = float(np.float32(keep)) * 2**_BITS
    return math.ceil(bound)


@cache
def best_mask(kernels: str) -> Any:
    """Return the operator or function that computes masks for a device type."""
    if kernels not in ("cuda", "xpu"):
        return keep_mask
    if find_spec("triton") is None:
        log.warning(
            "a dropout mask on %s takes 120 launches instead of one, because Triton is missing: "
            "pip install triton",
            kernels,
        )
        return keep_mask
    return torch.ops.hetpipe.keep_mask_by_triton.default


def _by_triton(
    rng: Tensor, site: int, size: list[int], keep: float, batch_dim: int, samples: int
) -> Tensor:
    out = torch.empty(size, dtype=torch.bool, device=rng.device)
    if out.is_meta or out.numel() == 0:
        return out
    from .mask_kernel import BLOCK, keep_mask_kernel

    before, batch, after = math.prod(size[:batch_dim]), size[batch_dim], size[batch_dim + 1 :]
    elements = out.numel() // samples
    blocks = (elements + 3) // 4
    arguments = (blocks, samples * blocks, elements, before, batch, math.prod(after))
    with torch.get_device_module(rng.device).device(rng.device):
        keep_mask_kernel[(samples * blocks + BLOCK - 1) // BLOCK,](
            rng, out.view(torch.uint8), site & MASK, limit(keep), *arguments, BLOCK=BLOCK
        )
    return out


_library: Any = torch.library.Library("hetpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "keep_mask_by_triton(Tensor rng, int site, SymInt[] size, float keep, int batch_dim, "
    "int samples) -> Tensor"
)
for _key in ("CUDA", "XPU", "Meta"):
    _library.impl("keep_mask_by_triton", _by_triton, _key)
