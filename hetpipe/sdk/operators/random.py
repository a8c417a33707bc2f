"""hetpipe's random operators: their numbers depend on the sample, not on the plan.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). The key is the
seed. With the batch dimension at the front, a result has the form [samples, E]. Element e of sample
s is word e % 4 of the block with counter (e // 4, first_sample + s, site, step). So every plan,
number of micro-batches, replica, device and recomputation draws the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hetpipe.sdk.operators.custom import define

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Compute Philox 4x32-10 on int64 tensors of 32-bit words; add a last dimension of 4 words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)  # the rounds give all words one shape


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a 32 x 32 bit product; int64 cannot hold all 64 bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (middle >> 32)) & MASK, middle & MASK


def draw(rng: Tensor, site: int, size: list[int], batch_dim: int, samples: int) -> Tensor:
    """Return a float32 tensor of `size`, uniform in [0, 1): multiples of 2^-24.

    `rng` is int64 (3,): the seed, the step, and the first sample's index in the mini-batch.
    `site` numbers the call in the model; size[batch_dim] is a multiple of `samples`.
    """
    seed, step, first_sample = rng.unbind()
    moved = [size[batch_dim], *size[:batch_dim], *size[batch_dim + 1 :]]
    elements = math.prod(moved) // samples
    block = torch.arange((elements + 3) // 4, device=rng.device)
    sample = (first_sample + torch.arange(samples, device=rng.device)) & MASK
    site_word = torch.full((), site & MASK, dtype=torch.int64, device=rng.device)
    counter = (block[None, :], sample[:, None], site_word, step & MASK)
    words = philox(counter, (seed & MASK, (seed >> 32) & MASK))
    drawn = words.reshape(samples, -1)[:, :elements].reshape(moved).movedim(0, batch_dim)
    return ((drawn >> 8).to(torch.float32) * 2.0**-24).contiguous()


def draw_mask(
    rng: Tensor, site: int, size: list[int], keep: float, batch_dim: int, samples: int
) -> Tensor:
    """Return a bool tensor of `size`, true with probability `keep`: dropout's mask. See `draw`."""
    return draw(rng, site, size, batch_dim, samples) < keep


def _empty(dtype: torch.dtype, rng: Tensor, site: int, size: list[int], *_: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device=rng.device)


keep_mask = define("keep_mask", draw_mask)
keep_mask.register_fake(partial(_empty, torch.bool))
uniform = define("uniform", draw)
uniform.register_fake(partial(_empty, torch.float32))

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.hetpipe.keep_mask.default: draw_mask,
    torch.ops.hetpipe.uniform.default: draw,
}
"""Decompositions into core ATen, for devices with int64 arithmetic but without these operators."""
