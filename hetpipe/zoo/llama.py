"""A network in the style of Llama (Touvron et al., 2023).

It has norms by the root mean square, rotary positions (Su et al., 2021), gated perceptrons
(Shazeer, 2020), and keys and values that groups of heads share (Ainslie et al., EMNLP 2023). The
published size is TinyLlama's (Zhang et al., 2024).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, language
from hetpipe.zoo.text import token_loss


class RMSNorm(nn.Module):
    """x (..., width) over its root mean square, times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of features of x (n, heads, length, size) by the angle of their position.

    The features of a pair are half of `size` apart.
    """
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class GroupedAttention(nn.Module):
    """Causal attention in which `heads / groups` heads share keys and values."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, groups * size, bias=False)
        self.v_proj = nn.Linear(width, groups * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        frequency = 1e4 ** -(torch.arange(0, size, 2.0) / size)
        angle = torch.outer(torch.arange(float(length)), frequency).repeat(1, 2)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
            for layer in (self.k_proj, self.v_proj)
        )
        q, k = (rotate(heads, self.cosine, self.sine) for heads in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return output


class LlamaLayer(nn.Module):
    """Attention and a gated perceptron; a norm precedes each, and each adds its input."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, length: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = GroupedAttention(width, heads, groups, length)
        self.post_attention_layernorm = RMSNorm(width)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        gated = functional.silu(self.gate_proj(y)) * self.up_proj(y)
        output: torch.Tensor = x + self.down_proj(gated)
        return output


class Llama(nn.Module):
    """(n, length) of tokens -> (n, length, vocabulary) logits of the next tokens."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, groups: int, hidden: int,
        layers: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(
            *(LlamaLayer(width, heads, groups, hidden, length) for _ in range(layers))
        )
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(self.norm(self.layers(self.embed_tokens(x))))
        return output


def _llama(vocabulary: int, length: int, mini_batch: int, *sizes: int) -> RandomModel:
    return RandomModel(
        lambda: Llama(vocabulary, length, *sizes), language(vocabulary, length), mini_batch,
        optim.adamw(lr=4e-4, weight_decay=0.1), token_loss,
    )  # fmt: skip


MODELS = {
    "llama": _llama(32000, 1024, 1, 2048, 32, 4, 5632, 22),  # TinyLlama: 1.1 G parameters
    "llama-small": _llama(100, 24, 4, 64, 4, 2, 160, 2),
}
