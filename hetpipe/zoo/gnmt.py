"""GNMT (Wu et al., 2016), as PipeDream, DAPPLE and BaPipe train it: LSTMs with attention.

The encoder's first layer reads in both directions. Each layer from the encoder's third and the
decoder's third on adds its input to its output. The output of the decoder's first layer is the
query of an attention (Bahdanau et al., ICLR 2015). All later layers of the decoder read the result,
the context. GNMT-8 has four layers in its encoder and four in its decoder, GNMT-16 has eight each.
"""

from __future__ import annotations

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, translation
from hetpipe.zoo.text import token_loss

DROPOUT = 0.2


def lstm(inner: int, width: int, both_ways: bool = False) -> nn.LSTM:
    """Return an LSTM layer; samples come first."""
    return nn.LSTM(inner, width, batch_first=True, bidirectional=both_ways)


class Encoder(nn.Module):
    """(n, length, width) -> (n, length, width)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        first, second = lstm(width, width, both_ways=True), lstm(2 * width, width)
        others = (lstm(width, width) for _ in range(layers - 2))
        self.rnn_layers = nn.ModuleList([first, second, *others])
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.rnn_layers):
            y, _ = layer(self.dropout(x))
            x = x + y if number >= 2 else y
        return x


class Attention(nn.Module):
    """Queries (n, target, width), keys (n, source, width) -> contexts (n, target, width).

    A score is the product of tanh(query + key) and a normed vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_q = nn.Linear(width, width, bias=False)
        self.linear_k = nn.Linear(width, width, bias=False)
        self.linear_att = nn.Parameter(width**-0.5 * torch.randn(width))
        self.normalize_scalar = nn.Parameter(torch.full((1,), width**-0.5))
        self.normalize_bias = nn.Parameter(torch.zeros(width))

    def forward(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        both = self.linear_q(query)[:, :, None] + self.linear_k(keys)[:, None]
        direction = self.linear_att / self.linear_att.norm()
        scores = torch.tanh(both + self.normalize_bias) @ direction * self.normalize_scalar
        output: torch.Tensor = scores.softmax(-1) @ keys
        return output


class Decoder(nn.Module):
    """(n, target, width) and the encoded (n, source, width) -> (n, target, width)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.att_rnn = lstm(width, width)
        self.attention = Attention(width)
        self.rnn_layers = nn.ModuleList(lstm(2 * width, width) for _ in range(layers - 1))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        x, _ = self.att_rnn(self.dropout(x))
        context = self.attention(x, encoded)
        for number, layer in enumerate(self.rnn_layers):
            y, _ = layer(torch.cat([self.dropout(x), context], -1))
            x = x + y if number >= 1 else y
        return x


class GNMT(nn.Module):
    """Source tokens (n, source), previous tokens (n, target) -> (n, target, vocabulary) logits."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedder_in = nn.Embedding(vocabulary, width)
        self.encoder = Encoder(width, layers)
        self.embedder_out = nn.Embedding(vocabulary, width)
        self.decoder = Decoder(width, layers)
        self.classifier = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, source: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.embedder_in(source))
        output: torch.Tensor = self.classifier(self.decoder(self.embedder_out(so_far), encoded))
        return output


def _gnmt(vocabulary: int, width: int, layers: int, length: int, mini_batch: int) -> RandomModel:
    return RandomModel(
        lambda: GNMT(vocabulary, width, layers), translation(vocabulary, length, length),
        mini_batch, optim.adam(lr=3e-4), token_loss,
    )  # fmt: skip


MODELS = {
    "gnmt8": _gnmt(32320, 1024, 4, 50, 64),  # 194 M parameters
    "gnmt8-small": _gnmt(100, 32, 4, 6, 4),
    "gnmt16": _gnmt(32320, 1024, 8, 50, 64),  # 278 M
    "gnmt16-small": _gnmt(100, 16, 8, 5, 4),
}
