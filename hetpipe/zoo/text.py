"""English text that every Python has, as tokens: the help pages of Python's `help()`.

The first nine tenths of the text are the training data, and the vocabulary of byte pairs is learned
from them. The last tenth is for validation. The amount of text depends on the version of Python:
0.5 MB in 3.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer
from hetpipe.zoo.data import Batches, eval_mode, seeded, shuffle_batches
from hetpipe.zoo.workload import Workload

BYTES = 256

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary: 256 bytes, then one token for each pair of earlier tokens in `merges`.

    The first tokens are bytes, so that every text can be coded (Sennrich et al., "Neural machine
    translation of rare words with subword units", ACL 2016).
    """

    merges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return BYTES + len(self.merges)

    def encode(self, text: bytes) -> Tokens:
        """Return the text's tokens as an array, after all merges in the order of `merges`."""
        tokens = _tokens(text)
        for token, pair in enumerate(self.merges, BYTES):
            tokens = _merge(tokens, pair, token)
        return tokens

    def decode(self, tokens: Tokens) -> bytes:
        words = [bytes([byte]) for byte in range(BYTES)]
        for first, second in self.merges:
            words.append(words[first] + words[second])
        return b"".join(words[token] for token in tokens)


def learn(text: bytes, size: int) -> BytePairs:
    """Learn a vocabulary of `size` tokens from this text: merge its most frequent pair repeatedly.

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


VOCABULARY = 512
VALIDATED = 64  # windows of the validation text for the perplexity


def corpus() -> bytes:
    """Return all topics of `pydoc_data`, sorted by name."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


@lru_cache(maxsize=1)
def encode_corpus() -> tuple[BytePairs, Tokens, Tokens]:
    """Return the vocabulary, the tokens for training, and the tokens for validation."""
    text = corpus()
    border = len(text) * 9 // 10
    pairs = learn(text[:border], VOCABULARY)
    return pairs, pairs.encode(text[:border]), pairs.encode(text[border:])


def windows(tokens: Tokens, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y, (complete windows, length) each; y is one token ahead of x."""
    count = (len(tokens) - 1) // length
    x, y = (tokens[lo : lo + count * length].reshape(count, length) for lo in (0, 1))
    return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())


def text_workload(
    name: str,
    model: Callable[[], nn.Module],
    length: int,
    optimizer: Optimizer,
    blocks: tuple[str, ...] = (),
) -> Workload:
    """Return the workload of a language model, with seeded weights, on windows of the corpus."""
    batches, validate, train_samples = language(length)
    return Workload(
        model=seeded(model),
        loss_fn=token_loss,
        batches=batches,
        name=name,
        mini_batch=32,
        optimizer=optimizer,
        validate=validate,
        train_samples=train_samples,
        blocks=blocks,
    )


def language(length: int) -> tuple[Batches, Callable[[nn.Module], dict[str, float]], int]:
    """Return a workload's `batches`, `validate` and `train_samples` for windows of `length`."""
    _, kept, held = encode_corpus()
    x, y = windows(kept, length)
    x_held, y_held = windows(held, length)
    return shuffle_batches(x, y), perplexity_on(x_held[:VALIDATED], y_held[:VALIDATED]), len(x)


def token_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (n, length, vocabulary) and tokens y (n, length).

    As each sample has `length` tokens, this is also the mean over samples.
    """
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def perplexity_on(x: torch.Tensor, y: torch.Tensor) -> Callable[[nn.Module], dict[str, float]]:
    """Return `validate(model)`, which returns the perplexity of y in eval mode."""

    def validate(model: nn.Module) -> dict[str, float]:
        with eval_mode(model):
            loss = token_loss(model(x), y)
        return {"perplexity": math.exp(loss)}

    return validate
