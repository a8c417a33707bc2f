"""English text that every Python has, as tokens: the help pages of Python's `help()`.

Its first nine tenths teach a vocabulary of byte pairs and are trained on; the last tenth validates.
How much text there is depends on the version of Python, 0.5 MB in 3.11.
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
from hetpipe.zoo.data import Batches, evaluating, shuffled
from hetpipe.zoo.workload import Workload

VOCABULARY = 512
VALIDATED = 64  # windows of the validation text in a perplexity


def corpus() -> bytes:
    """All topics of `pydoc_data`, sorted by name."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


@lru_cache(maxsize=1)
def coded() -> tuple[BytePairs, Tokens, Tokens]:
    """The vocabulary, and the tokens to train and to validate on."""
    text = corpus()
    border = len(text) * 9 // 10
    pairs = learn(text[:border], VOCABULARY)
    return pairs, pairs.encode(text[:border]), pairs.encode(text[border:])


def windows(tokens: Tokens, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y, (windows, length) each: y is x one token later. Drops an incomplete last window."""
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
    """A language model that trains on windows of `length` tokens, with weights of a fixed seed."""
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
    """`batches`, `validate` and the windows in an epoch, for windows of `length` tokens."""
    _, kept, held = coded()
    x, y = windows(kept, length)
    x_held, y_held = windows(held, length)
    return shuffled(x, y), perplexity_on(x_held[:VALIDATED], y_held[:VALIDATED]), len(x)


def token_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy: logits (n, length, vocabulary), y (n, length) of tokens.

    As each sample has `length` tokens, this is also the mean over samples.
    """
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def perplexity_on(x: torch.Tensor, y: torch.Tensor) -> Callable[[nn.Module], dict[str, float]]:
    """`validate(model)`: e to the mean cross entropy of a token of y, in eval mode."""

    def validate(model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            loss = token_loss(model(x), y)
        return {"perplexity": math.exp(loss)}

    return validate
