"""Recurrent networks: a language model, and a classifier of film reviews as PipeOptim trains it.

The workload `lstm` learns Python's help pages with two LSTM layers (Hochreiter and Schmidhuber,
1997) between an embedding and a linear layer; forget gates start open (Jozefowicz et al., ICML
2015).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.random_data import RandomModel
from hetpipe.zoo.text import VOCABULARY, text_workload
from hetpipe.zoo.workload import Workload

LAYERS = 2
WIDTH = 256
LENGTH = 128  # tokens in a sample


class Recurrent(nn.Module):
    """(n, length) of tokens -> (n, length, vocabulary) logits of the next tokens."""

    def __init__(
        self, vocabulary: int = VOCABULARY, width: int = WIDTH, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # Each layer is a module, so that a pipeline can be cut between the layers.
        recurrent = [nn.LSTM(width, width, batch_first=True) for _ in range(layers)]
        self.layers = nn.ModuleList(recurrent)
        self.head = nn.Linear(width, vocabulary)
        for layer in recurrent:
            open_forget_gate(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        for layer in self.layers:
            y, _ = layer(y)
        return self.head(y)


def open_forget_gate(layer: nn.LSTM) -> None:
    """Set the forget gate's bias to 1; torch's order of gates is input, forget, cell, output."""
    width = layer.hidden_size
    with torch.no_grad():
        for index in range(layer.num_layers):
            getattr(layer, f"bias_ih_l{index}")[width : 2 * width] = 1.0
            getattr(layer, f"bias_hh_l{index}")[width : 2 * width] = 0.0


def workload() -> Workload:
    """Return the workload, with weights from a fixed seed."""
    return text_workload("lstm", Recurrent, LENGTH, optim.adamw(lr=3e-3))


class ResidualLstm(nn.Module):
    """A residual LSTM (Kim et al., Interspeech 2017): (n, length) of tokens -> (n, classes).

    Each layer adds its input to its output. The mean of the last layer's outputs over a review's
    tokens is classified.
    """

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
        return self.head(y.mean(1))


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
