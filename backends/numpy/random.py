"""Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Ten rounds over `counter` uint64 [..., 4] of 32-bit words; the same shape of words."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    for i in range(10):
        k0, k1 = (np.uint64((k + i * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL, strict=True))
        a, b = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (b >> _HALF) ^ c1 ^ k0, b & _LOW, (a >> _HALF) ^ c3 ^ k1, a & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniform(rng: Array, site: int, size: Sequence[int], batch_dim: int, samples: int) -> Array:
    """hetpipe.uniform: float32 [*size] in [0, 1), by seed, step, sample, site and place alone.

    `rng` is int64 (3,): seed, step, index of the first sample.
    """
    seed, step, first = (int(value) & 0xFFFFFFFFFFFFFFFF for value in rng)
    moved = (size[batch_dim], *size[:batch_dim], *size[batch_dim + 1 :])
    each = math.prod(size) // samples
    counter = np.zeros((samples, -(-each // 4), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = ((first + np.arange(samples)) & 0xFFFFFFFF)[:, None]
    counter[..., 2] = site & 0xFFFFFFFF
    counter[..., 3] = step & 0xFFFFFFFF
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(samples, -1)[:, :each]
    drawn = (words >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return np.moveaxis(drawn.reshape(moved), 0, batch_dim)


def keep_mask(
    rng: Array, site: int, size: Sequence[int], keep: float, batch_dim: int, samples: int
) -> Array:
    """hetpipe.keep_mask: bool [*size], true with probability `keep` in float32."""
    return uniform(rng, site, size, batch_dim, samples) < np.float32(keep)
