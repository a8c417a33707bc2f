"""Random numbers by Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .convolution import Array

MASK = 0xFFFFFFFF


def philox(counter: Any, key: tuple[int, int]) -> Array:
    """Apply ten rounds to the four words (uint64) of `counter`; add a last dimension of 4 words."""
    c0, c1, c2, c3 = counter
    low, half = np.uint64(MASK), np.uint64(32)
    for i in range(10):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) & MASK)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) & MASK)
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
    return np.stack([c0, c1, c2, c3], axis=-1)  # the rounds have broadcast all four


def uniform(rng: Array, site: int, size: Sequence[int], batch_dim: int, samples: int) -> Array:
    """Compute hetpipe.uniform: float32 [*size] in [0, 1); rng: seed, step, first sample's index."""
    seed, step, first = map(int, rng)
    each = math.prod(size) // samples
    sample = (first + np.arange(samples)[:, None]) & MASK
    counter = (np.arange(-(-each // 4)), sample, site & MASK, step & MASK)
    words = philox([np.asarray(c, np.uint64) for c in counter], (seed & MASK, seed >> 32 & MASK))
    drawn = (words.reshape(samples, -1)[:, :each] >> np.uint64(8)) * np.float32(2.0**-24)
    moved = (size[batch_dim], *size[:batch_dim], *size[batch_dim + 1 :])
    return np.moveaxis(drawn.astype(np.float32).reshape(moved), 0, batch_dim)


def keep_mask(rng: Array, site: int, size: Sequence[int], keep: float, *how: int) -> Array:
    """Compute hetpipe.keep_mask: bool [*size], true with probability `keep` in float32."""
    return uniform(rng, site, size, *how) < np.float32(keep)
