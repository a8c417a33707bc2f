"""The AWD-LSTM language model (Merity et al., ICLR 2018), on tokens as in the Penn Treebank.

It has three LSTM layers, and the output shares the embedding's weights. Dropout drops a feature for
all tokens of a sample. The paper also drops weights of the recurrent matrices and words of the
embedding, the same ones in a whole mini-batch. This is left out, because micro-batches would draw
different ones, and so train different networks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.random_data import RandomModel, language
from hetpipe.zoo.text import token_loss


class LockedDropout(nn.Dropout):
    """Drops features of (n, length, width), the same features for all tokens of a sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = functional.dropout(torch.ones_like(x[:, :1]), self.p, self.training)
        return x * kept


class AwdLstm(nn.Module):
    """(n, length) of tokens -> (n, length, vocabulary) logits of the next tokens."""

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
        return self.decoder(self.dropout(y))


def _awd(vocabulary: int, embedding: int, hidden: int, length: int, mini_batch: int) -> RandomModel:
    return RandomModel(
        lambda: AwdLstm(vocabulary, embedding, hidden), language(vocabulary, length), mini_batch,
        optim.sgd(lr=30.0, weight_decay=1.2e-6), token_loss,
    )  # fmt: skip


MODELS = {
    "awd-lstm": _awd(10000, 400, 1150, 70, 80),  # 24 M parameters
    "awd-lstm-small": _awd(100, 24, 40, 8, 4),
}
