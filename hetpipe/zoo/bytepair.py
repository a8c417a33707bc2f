"""Byte-pair coding of text: repeatedly, the most frequent pair of neighbouring tokens is merged.

It follows Sennrich et al., "Neural machine translation of rare words with subword units" (ACL
2016). The first tokens are bytes, so that every text can be coded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpipe.errors import HetpipeError

BYTES = 256

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary: 256 bytes, then one token for each pair of earlier tokens in `merges`."""

    merges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return BYTES + len(self.merges)

    def encode(self, text: bytes) -> Tokens:
        """Return the text's tokens as an array, after all merges in the order of learning."""
        tokens = _tokens(text)
        for token, pair in enumerate(self.merges, BYTES):
            tokens = _merge(tokens, pair, token)
        return tokens

    def decode(self, tokens: Tokens) -> bytes:
        """Return the text of these tokens."""
        words = [bytes([byte]) for byte in range(BYTES)]
        for first, second in self.merges:
            words.append(words[first] + words[second])
        return b"".join(words[token] for token in tokens)


def learn(text: bytes, size: int) -> BytePairs:
    """Learn a vocabulary of `size` tokens from this text.

    Among equally frequent pairs, the pair with the smaller tokens is merged. Raises `HetpipeError`
    if the text has too few pairs.
    """
    tokens = _tokens(text)
    merges: list[tuple[int, int]] = []
    for token in range(BYTES, size):
        if len(tokens) < 2:
            raise HetpipeError(
                f"{len(text)} bytes of text teach {token} tokens, not {size}: "
                "give more text, or ask for fewer tokens"
            )
        counts = np.bincount(tokens[:-1] * token + tokens[1:])  # all tokens are below `token`
        first, second = divmod(int(counts.argmax()), token)
        merges.append((first, second))
        tokens = _merge(tokens, (first, second), token)
    return BytePairs(tuple(merges))


def _tokens(text: bytes) -> Tokens:
    return np.frombuffer(text, np.uint8).astype(np.int64)


def _merge(tokens: Tokens, pair: tuple[int, int], token: int) -> Tokens:
    """Replace every occurrence of `pair` in the tokens by `token`, from the left."""
    first, second = pair
    hits = np.flatnonzero((tokens[:-1] == first) & (tokens[1:] == second))
    if first == second:  # hits overlap in a run of equal tokens: every second hit counts
        begins = np.where(np.diff(hits, prepend=-2) > 1, hits, 0)
        hits = hits[(hits - np.maximum.accumulate(begins)) % 2 == 0]
    tokens = tokens.copy()
    tokens[hits] = token
    return np.delete(tokens, hits + 1)
