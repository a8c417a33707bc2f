"""GPT: `gpt` and `gpt-untied` learn Python's help pages, and `gpt2` learns random tokens.

`gpt` has 13 MB of weights. The network follows GPT-2 (Radford et al., "Language
models are unsupervised multitask learners", 2019): the output shares the token embedding's weights,
and initial weights are normal. Weights of layers whose output is added to the residual stream are
smaller by the root of the number of these layers. The deviation of the other weights is
root(2 / (5 width)) (Nguyen and Salazar, "Transformers without tears", 2019), 0.04 in `gpt`. With
GPT-2's deviation of 0.02 and a learning rate of 1e-3, `gpt` would long predict only the frequencies
of tokens. There is no dropout.

`gpt-untied` has separate output weights, so its stages share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, language
from hetpipe.zoo.text import VOCABULARY, text_workload, token_loss
from hetpipe.zoo.workload import Workload

BLOCKS = 4
WIDTH = 256
HEADS = 4
LENGTH = 128  # tokens in a sample


class Attention(nn.Module):
    """Causal attention of `heads` heads: (n, length, width) -> (n, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and with a skip, on (n, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        output: torch.Tensor = x + self.outer(functional.gelu(self.inner(self.norm2(x))))
        return output


class Embedding(nn.Module):
    """Adds vectors of token and position: (n, length) of tokens -> (n, length, width)."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tokens(x) + self.positions
        return output


class GPT(nn.Module):
    """(n, length) of tokens -> (n, length, vocabulary) logits of the next tokens."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        width: int = WIDTH,
        heads: int = HEADS,
        blocks: int = BLOCKS,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        self._initialise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(x))))
        return output

    def _initialise(self) -> None:
        plain = math.sqrt(2 / (5 * self.norm.weight.numel()))
        added = plain / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_added = name.endswith(("attention.out.weight", "outer.weight"))
                nn.init.normal_(parameter, std=added if is_added else plain)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def workload() -> Workload:
    return _workload("gpt", GPT)


def untied_workload() -> Workload:
    return _workload("gpt-untied", partial(GPT, tied=False))


def _workload(name: str, model: Callable[[], nn.Module]) -> Workload:
    blocks = tuple(f"blocks.{index}" for index in range(BLOCKS))
    return text_workload(name, model, LENGTH, optim.adamw(lr=6e-4), blocks)


def _gpt2(vocabulary: int, length: int, width: int, heads: int, blocks: int) -> RandomModel:
    return RandomModel(
        lambda: GPT(vocabulary, length, width, heads, blocks), language(vocabulary, length), 8,
        optim.adamw(lr=6e-4, weight_decay=0.1), token_loss,
    )  # fmt: skip


MODELS = {
    "gpt2": _gpt2(50257, 1024, 768, 12, 12),  # 124 M parameters
    "gpt2-small": _gpt2(100, 24, 64, 4, 2),
}
