"""A residual LSTM (Kim et al., Interspeech 2017) for film reviews, as PipeOptim trains it.

Each layer adds its input to its output; the mean over a review's tokens is classified.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.random_data import RandomModel


class ResidualLstm(nn.Module):
    """(n, length) of tokens -> (n, classes)."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        for layer in self.layers:
            added, _ = layer(self.dropout(y))
            y = y + added
        logits: torch.Tensor = self.head(y.mean(1))
        return logits


def _lstm(vocabulary: int, width: int, layers: int, length: int, mini_batch: int) -> RandomModel:
    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(vocabulary, (samples, length), generator=generator)
        return x, torch.randint(2, (samples,), generator=generator)

    network = partial(ResidualLstm, vocabulary, width, layers)
    return RandomModel(network, draw, mini_batch, optim.adam(lr=1e-3))


MODELS = {
    "residual-lstm": _lstm(30000, 512, 8, 256, 64),  # 32 M parameters
    "residual-lstm-small": _lstm(100, 32, 4, 8, 4),
}
