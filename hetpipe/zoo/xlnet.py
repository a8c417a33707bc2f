"""XLNet (Yang et al., NeurIPS 2019) for questions as in SQuAD: attention by relative positions.

It is the network for fine-tuning: one stream, in which every token sees all others. Tensors are
(length, n, width), as in the paper's code. XLNet-36 is XLNet-large with 36 layers, as DAPPLE trains
it. DAPPLE's paper gives 500 M parameters; here the network has 524 M.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, span_loss, spans

DROPOUT = 0.1


def relative_positions(length: int, width: int) -> torch.Tensor:
    """Return (2 length, width): sines and cosines of the distances length .. 1 - length."""
    distance = torch.arange(length, -length, -1.0)
    frequency = 1e4 ** -(torch.arange(0, width, 2.0) / width)
    angle = torch.einsum("i,d->id", distance, frequency)
    return torch.cat([angle.sin(), angle.cos()], -1)


def shift_distances(scores: torch.Tensor) -> torch.Tensor:
    """Turn scores by distance, (n, heads, length, 2 length), into scores by key.

    The last axis of the result, (n, heads, length, length), is the key.
    """
    n, heads, length, distances = scores.shape
    rows = scores.reshape(n, heads, distances, length)[:, :, 1:]
    return rows.reshape(n, heads, length, distances - 1)[..., :length]


class RelativeAttention(nn.Module):
    """Attention whose scores add a part by content and a part by distance, each with a bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        size = width // heads
        for name in "qkvor":
            self.register_parameter(name, nn.Parameter(0.02 * torch.randn(width, heads, size)))
        self.r_w_bias = nn.Parameter(0.02 * torch.randn(heads, size))
        self.r_r_bias = nn.Parameter(0.02 * torch.randn(heads, size))
        self.layer_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, h: torch.Tensor, r: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("ibh,hnd->ibnd", h, w) for w in (self.q, self.k, self.v))
        k_r = torch.einsum("jh,hnd->jnd", r, self.r)
        content = torch.einsum("ibnd,jbnd->bnij", q + self.r_w_bias, k)
        distance = shift_distances(torch.einsum("ibnd,jnd->bnij", q + self.r_r_bias, k_r))
        scores = (content + distance) * q.shape[-1] ** -0.5 + bias
        weights = self.dropout(scores.softmax(-1))
        y = torch.einsum("bnij,jbnd->ibnd", weights, v)
        y = self.dropout(torch.einsum("ibnd,hnd->ibh", y, self.o))
        output: torch.Tensor = self.layer_norm(h + y)
        return output


class XLNetLayer(nn.Module):
    """Attention, then a perceptron four times as wide; each adds its input, then a norm follows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.rel_attn = RelativeAttention(width, heads)
        self.layer_1 = nn.Linear(width, 4 * width)
        self.layer_2 = nn.Linear(4 * width, width)
        self.layer_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, h: torch.Tensor, r: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        h = self.rel_attn(h, r, bias)
        y = self.layer_2(self.dropout(functional.gelu(self.layer_1(h))))
        output: torch.Tensor = self.layer_norm(h + self.dropout(y))
        return output


class XLNet(nn.Module):
    """Tokens and a mask (0: padding), (n, length) -> logits (n, length, 2) of an answer's ends."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("r", relative_positions(length, width), persistent=False)
        self.layers = nn.ModuleList(XLNetLayer(width, heads) for _ in range(layers))
        self.dropout = nn.Dropout(DROPOUT)
        self.qa_outputs = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.dropout(self.word_embedding(tokens).transpose(0, 1))
        bias = (1.0 - mask[:, None, None].to(h.dtype)) * -1e4
        for layer in self.layers:
            h = layer(h, self.r, bias)
        output: torch.Tensor = self.qa_outputs(h.transpose(0, 1))
        return output


def _xlnet(
    vocabulary: int, length: int, width: int, heads: int, layers: int, mini_batch: int
) -> RandomModel:
    return RandomModel(
        lambda: XLNet(vocabulary, length, width, heads, layers), spans(vocabulary, length),
        mini_batch, optim.adamw(lr=2e-5), span_loss,
    )  # fmt: skip


MODELS = {
    "xlnet36": _xlnet(32000, 384, 1024, 16, 36, 1),  # 524 M parameters
    "xlnet36-small": _xlnet(100, 24, 64, 4, 3, 4),
}
