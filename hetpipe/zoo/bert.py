"""BERT (Devlin et al., NAACL 2019) for questions as in SQuAD: where an answer begins and ends.

BERT-large has 24 layers. DAPPLE trains BERT-48, with 48 such layers, on SQuAD 2.0; its paper gives
640 M parameters.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, span_loss, spans

DROPOUT = 0.1


class BertLayer(nn.Module):
    """Attention and a perceptron, each with a skip and then a norm, on (n, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Add `bias` (n, 1, 1, length) to the scores of keys."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
        y = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.dropout(self.output(y)))
        y = self.outer(functional.gelu(self.intermediate(x)))
        output: torch.Tensor = self.norm2(x + self.dropout(y))
        return output


class Bert(nn.Module):
    """Tokens and a mask (0: padding), (n, length) -> logits (n, length, 2) of an answer's ends."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Parameter(torch.zeros(length, width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.qa_outputs = nn.Linear(width, 2)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings
        x = self.dropout(self.norm(x))
        bias = (1.0 - mask[:, None, None].to(x.dtype)) * -1e4
        for layer in self.layers:
            x = layer(x, bias)
        output: torch.Tensor = self.qa_outputs(x)
        return output


def _bert(
    vocabulary: int, length: int, width: int, heads: int, layers: int, mini_batch: int
) -> RandomModel:
    return RandomModel(
        lambda: Bert(vocabulary, length, width, heads, layers), spans(vocabulary, length),
        mini_batch, optim.adamw(lr=5e-5), span_loss,
    )  # fmt: skip


MODELS = {
    "bert-large": _bert(30522, 384, 1024, 16, 24, 8),  # 334 M parameters
    "bert-large-small": _bert(100, 24, 64, 4, 3, 4),
    "bert48": _bert(30522, 384, 1024, 16, 48, 2),  # 636 M
    "bert48-small": _bert(100, 24, 32, 2, 6, 4),
}
