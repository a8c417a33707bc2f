"""T5 (Raffel et al., JMLR 2020): an encoder and a decoder with relative position biases.

A bias belongs to a bucket of distances; buckets of larger distances are wider. The published size
is T5-base.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, translation
from hetpipe.zoo.llama import RMSNorm
from hetpipe.zoo.text import token_loss

BUCKETS, FARTHEST = 32, 128
DROPOUT = 0.1


def buckets(length: int, both_ways: bool) -> torch.Tensor:
    """Return (length, length): the bucket of the distance from each query to each key.

    With `both_ways`, keys before and after the query have different buckets.
    """
    place = torch.arange(length)
    distance = place[None] - place[:, None]
    count, first = BUCKETS, torch.zeros_like(distance)
    if both_ways:
        count //= 2
        first = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(FARTHEST / exact) * (count - exact)
    bucket = (exact + far.long()).clamp(max=count - 1)
    return first + torch.where(distance < exact, distance, bucket)


class T5Attention(nn.Module):
    """Attention without a scale: queries from x, keys and values from `other`.

    x (n, length, width), `other` (n, other length, width) -> (n, length, width)
    """

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, heads * size, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * size, width, bias=False)
        self.dropout = nn.Dropout(DROPOUT)
        nn.init.normal_(self.q.weight, std=(width * size) ** -0.5)

    def forward(
        self, x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.q, x), (self.k, other), (self.v, other))
        )
        scores = q @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        y = self.dropout(scores.softmax(-1)) @ v
        output: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return output


class T5Block(nn.Module):
    """Attention (a decoder adds attention on `encoded`) and a perceptron; a norm precedes each."""

    def __init__(self, width: int, heads: int, size: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.norm1, self.norm3 = RMSNorm(width), RMSNorm(width)
        self.attention = T5Attention(width, heads, size)
        if decodes:
            self.norm2 = RMSNorm(width)
            self.cross = T5Attention(width, heads, size)
        self.wi = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, encoded: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if encoded is not None:
            x = x + self.dropout(self.cross(self.norm2(x), encoded, None))
        y = self.wo(self.dropout(functional.relu(self.wi(self.norm3(x)))))
        output: torch.Tensor = x + self.dropout(y)
        return output


class T5Stack(nn.Module):
    """An encoder or a decoder, whose blocks share their position biases."""

    def __init__(
        self, width: int, heads: int, size: int, hidden: int, layers: int, length: int,
        decodes: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.biases = nn.Embedding(BUCKETS, heads)
        self.block = nn.ModuleList(
            T5Block(width, heads, size, hidden, decodes) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("buckets", buckets(length, not decodes), persistent=False)
        future = torch.full((length, length), -1e4 if decodes else 0.0).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        bias = self.biases(self.buckets).permute(2, 0, 1) + self.future
        x = self.dropout(x)
        for block in self.block:
            x = block(x, bias, encoded)
        output: torch.Tensor = self.dropout(self.norm(x))
        return output


class T5(nn.Module):
    """Source tokens and previous tokens, (n, length) each -> (n, length, vocabulary) logits."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, size: int, hidden: int,
        layers: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(width, heads, size, hidden, layers, length, decodes=False)
        self.decoder = T5Stack(width, heads, size, hidden, layers, length, decodes=True)
        self.scale = width**-0.5  # the output shares the embedding's weights

    def forward(self, source: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        y = self.decoder(self.shared(so_far), self.encoder(self.shared(source)))
        return functional.linear(y * self.scale, self.shared.weight)


def _t5(vocabulary: int, length: int, mini_batch: int, *sizes: int) -> RandomModel:
    return RandomModel(
        lambda: T5(vocabulary, length, *sizes), translation(vocabulary, length, length), mini_batch,
        optim.adamw(lr=1e-4), token_loss,
    )  # fmt: skip


MODELS = {
    "t5": _t5(32128, 512, 8, 768, 12, 64, 3072, 12),  # T5-base: 223 M parameters
    "t5-small": _t5(100, 24, 4, 64, 4, 16, 128, 2),
}
