"""S2VT (Venugopalan et al., ICCV 2015): from a film's frames to a sentence, by two LSTM layers.

Both layers process one sequence: first the frames, then the words. The first layer reads the
frames, then zeros. The second layer reads the first layer's output; beside it, zeros during the
frames and then the previous words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.random_data import RandomModel, language
from hetpipe.zoo.text import token_loss


class S2VT(nn.Module):
    """Frames (n, frames, features), previous words (n, length) -> (n, length, vocabulary)."""

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
        return self.out(self.dropout(y[:, frames.shape[1] :]))


def _s2vt(sizes: tuple[int, int, int, int], frames: int, length: int, batch: int) -> RandomModel:
    features, vocabulary, *_ = sizes
    sentences = language(vocabulary, length)

    def draw(samples: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        film = torch.randn(samples, frames, features, generator=generator)
        so_far, following = sentences(samples, generator)
        return (film, so_far), following

    return RandomModel(lambda: S2VT(*sizes), draw, batch, optim.sgd(lr=0.01), token_loss)


MODELS = {
    "s2vt": _s2vt((4096, 12594, 500, 1000), 80, 30, 80),  # 37 M parameters
    "s2vt-small": _s2vt((24, 100, 16, 32), 6, 4, 4),
}
