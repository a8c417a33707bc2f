"""English text that every Python has, as tokens: the help pages of Python's `help()`.

The first nine tenths of the text are the training data, and the vocabulary of byte pairs is learned
from them. The last tenth is for validation. The amount of text depends on the version of Python:
0.5 MB in 3.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from hetpipe.optim.rule import Optimizer
from hetpipe.zoo.bytepair import BytePairs, Tokens, learn
from hetpipe.zoo.data import Batches, eval_mode, shuffle_batches
from hetpipe.zoo.workload import Workload

VOCABULARY = 512
VALIDATED = 64  # windows of the validation text from which the perplexity is computed


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
    """Return x and y, (windows, length) each; each token of y follows the token of x at its place.

    An incomplete last window is dropped.
    """
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
    """Return a workload: a language model, with weights from a fixed seed, on `length` tokens."""
    batches, validate, train_samples = language(length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = model()
    return Workload(
        model=network,
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
    """Return `validate(model)`, which returns the perplexity of y in eval mode.

    The perplexity is e to the power of a token's mean cross entropy.
    """

    def validate(model: nn.Module) -> dict[str, float]:
        with eval_mode(model):
            loss = token_loss(model(x), y)
        return {"perplexity": math.exp(loss)}

    return validate
