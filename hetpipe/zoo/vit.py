"""Vision transformer (Dosovitskiy et al., ICLR 2021). The modules have torchvision's names."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, images


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each after a norm and with a skip, on (n, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        output: torch.Tensor = x + self.mlp(self.ln_2(x))
        return output


class VisionTransformer(nn.Module):
    """(n, 3, size, size) -> (n, classes)."""

    def __init__(
        self, size: int, patch: int, width: int, heads: int, blocks: int, classes: int
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        length = (size // patch) ** 2 + 1
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.layers = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(blocks)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.heads = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(x.shape[0], -1, -1)
        y = torch.cat([first, patches], 1) + self.pos_embedding
        output: torch.Tensor = self.heads(self.ln(self.layers(y))[:, 0])
        return output


def _vit(size: int, patch: int, width: int, heads: int, blocks: int, classes: int) -> RandomModel:
    return RandomModel(
        lambda: VisionTransformer(size, patch, width, heads, blocks, classes),
        images(size, classes), 32, optim.adamw(lr=1e-3, weight_decay=0.1),
    )  # fmt: skip


MODELS = {
    "vit": _vit(224, 16, 768, 12, 12, 1000),  # ViT-B/16: 86 M parameters
    "vit-small": _vit(32, 8, 64, 4, 2, 10),
}
