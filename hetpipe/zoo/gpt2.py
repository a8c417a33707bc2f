"""GPT-2 of 124 M parameters (Radford et al., 2019), and a small one, on random tokens."""

from __future__ import annotations

from hetpipe import optim
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.random_data import language, random_workload
from hetpipe.zoo.text import token_loss
from hetpipe.zoo.workload import Workload


def gpt2() -> Workload:
    """12 blocks of width 768, 1024 tokens: 124 M parameters."""
    return _workload("gpt2", 50257, 1024, 768, 12, 12)


def gpt2_small() -> Workload:
    """Two blocks of width 64."""
    return _workload("gpt2-small", 100, 24, 64, 4, 2)


def _workload(
    name: str, vocabulary: int, length: int, width: int, heads: int, blocks: int
) -> Workload:
    return random_workload(
        name, lambda: GPT(vocabulary, length, width, heads, blocks), language(vocabulary, length),
        8, optim.adamw(lr=6e-4, weight_decay=0.1), token_loss,
    )  # fmt: skip
