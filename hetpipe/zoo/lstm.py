"""Recurrent networks: language models, a classifier of film reviews, and captions of films."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, language
from hetpipe.zoo.text import VOCABULARY, text_workload, token_loss
from hetpipe.zoo.workload import Workload

LAYERS = 2
WIDTH = 256
LENGTH = 128  # tokens in a sample


class Recurrent(nn.Module):
    """LSTM layers (Hochreiter and Schmidhuber, 1997) between an embedding and a linear layer.

    (n, length) of tokens -> (n, length, vocabulary) logits of the next tokens. Forget gates start
    open (Jozefowicz et al., ICML 2015).
    """

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
        output: torch.Tensor = self.head(y)
        return output


def open_forget_gate(layer: nn.LSTM) -> None:
    """Set the forget gate's bias to 1; torch's order of gates is input, forget, cell, output."""
    width = layer.hidden_size
    with torch.no_grad():
        for index in range(layer.num_layers):
            getattr(layer, f"bias_ih_l{index}")[width : 2 * width] = 1.0
            getattr(layer, f"bias_hh_l{index}")[width : 2 * width] = 0.0


def workload() -> Workload:
    """Return the workload `lstm` on Python's help pages, with weights from a fixed seed."""
    return text_workload("lstm", Recurrent, LENGTH, optim.adamw(lr=3e-3))


class ResidualLstm(nn.Module):
    """A residual LSTM (Kim et al., Interspeech 2017): (n, length) of tokens -> (n, classes).

    PipeOptim trains it as a classifier of film reviews. Each layer adds its input to its output.
    The classifier reads the mean, over a review's tokens, of the last layer's outputs.
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
        output: torch.Tensor = self.head(y.mean(1))
        return output


def _lstm(vocabulary: int, width: int, layers: int, length: int, mini_batch: int) -> RandomModel:
    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(vocabulary, (samples, length), generator=generator)
        return x, torch.randint(2, (samples,), generator=generator)

    network = partial(ResidualLstm, vocabulary, width, layers)
    return RandomModel(network, draw, mini_batch, optim.adam(lr=1e-3))


class LockedDropout(nn.Dropout):
    """Drops features of (n, length, width), the same features for all tokens of a sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = functional.dropout(torch.ones_like(x[:, :1]), self.p, self.training)
        return x * kept


class AwdLstm(nn.Module):
    """The AWD-LSTM (Merity et al., ICLR 2018), for tokens as in the Penn Treebank.

    (n, length) of tokens -> (n, length, vocabulary) logits of the next tokens. The output shares
    the embedding's weights. The paper also drops recurrent weights and words of the embedding for
    a whole mini-batch. This is left out here: each micro-batch would drop different weights and
    words, and so train a different network.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, embedding)
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.rnns = nn.ModuleList(
            nn.LSTM(widths[at], widths[at + 1], batch_first=True) for at in range(layers)
        )
        self.decoder = nn.Linear(embedding, vocabulary)
        self.decoder.weight = self.encoder.weight
        self.dropouti, self.dropouth, self.dropout = map(LockedDropout, (0.4, 0.25, 0.4))
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropouti(self.encoder(x))
        for number, rnn in enumerate(self.rnns):
            y, _ = rnn(self.dropouth(y) if number else y)
        output: torch.Tensor = self.decoder(self.dropout(y))
        return output


def _awd(vocabulary: int, embedding: int, hidden: int, length: int, mini_batch: int) -> RandomModel:
    return RandomModel(
        lambda: AwdLstm(vocabulary, embedding, hidden), language(vocabulary, length), mini_batch,
        optim.sgd(lr=30.0, weight_decay=1.2e-6), token_loss,
    )  # fmt: skip


class S2VT(nn.Module):
    """S2VT (Venugopalan et al., ICCV 2015): from a film's frames to a sentence.

    Frames (n, frames, features), previous words (n, length) -> (n, length, vocabulary). Both LSTM
    layers process one sequence: first the frames, then the words. The first layer reads the frames,
    then zeros. The second layer reads the first layer's output, joined with zeros during the frames
    and with the previous words after them.
    """

    def __init__(self, features: int, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.frame_embed = nn.Linear(features, embedding)
        self.word_embed = nn.Embedding(vocabulary, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden + embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, frames: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        seen = self.frame_embed(self.dropout(frames))
        words = self.dropout(self.word_embed(so_far))
        y, _ = self.lstm1(functional.pad(seen, (0, 0, 0, so_far.shape[1])))
        said = functional.pad(words, (0, 0, frames.shape[1], 0))
        y, _ = self.lstm2(torch.cat([y, said], -1))
        output: torch.Tensor = self.out(self.dropout(y[:, frames.shape[1] :]))
        return output


def _s2vt(sizes: tuple[int, int, int, int], frames: int, length: int, batch: int) -> RandomModel:
    features, vocabulary, *_ = sizes
    sentences = language(vocabulary, length)

    def draw(samples: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        film = torch.randn(samples, frames, features, generator=generator)
        so_far, following = sentences(samples, generator)
        return (film, so_far), following

    return RandomModel(lambda: S2VT(*sizes), draw, batch, optim.sgd(lr=0.01), token_loss)


MODELS = {
    "awd-lstm": _awd(10000, 400, 1150, 70, 80),  # 24 M parameters
    "awd-lstm-small": _awd(100, 24, 40, 8, 4),
    "residual-lstm": _lstm(30000, 512, 8, 256, 64),  # 32 M parameters
    "residual-lstm-small": _lstm(100, 32, 4, 8, 4),
    "s2vt": _s2vt((4096, 12594, 500, 1000), 80, 30, 80),  # 37 M parameters
    "s2vt-small": _s2vt((24, 100, 16, 32), 6, 4, 4),
}
