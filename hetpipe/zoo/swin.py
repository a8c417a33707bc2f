"""Swin transformer (Liu et al., ICCV 2021): attention in windows, shifted in every second block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, images


def windows_of(x: torch.Tensor, window: int) -> torch.Tensor:
    """Divide (n, size, size, width) into windows: (n * windows, window * window, width)."""
    n, size, _, width = x.shape
    parts = size // window
    split = x.view(n, parts, window, parts, window, width)
    return split.transpose(2, 3).reshape(-1, window * window, width)


def join_windows(x: torch.Tensor, window: int, size: int) -> torch.Tensor:
    """Do the inverse of `windows_of`."""
    parts = size // window
    split = x.view(-1, parts, parts, window, window, x.shape[-1])
    return split.transpose(2, 3).reshape(-1, size, size, x.shape[-1])


def relative_index(window: int) -> torch.Tensor:
    """Return (window^2, window^2): the index of the relative position of each pair of positions."""
    place = torch.arange(window)
    rows, columns = (each.flatten() for each in torch.meshgrid(place, place, indexing="ij"))
    down = rows[:, None] - rows[None] + window - 1
    right = columns[:, None] - columns[None] + window - 1
    return down * (2 * window - 1) + right


def shift_mask(size: int, window: int, shift: int) -> torch.Tensor:
    """Return (windows, window^2, window^2): -100 for pairs that only the shift joined, else 0."""
    band = torch.zeros(size)
    band[size - window : size - shift] = 1
    band[size - shift :] = 2
    region = (3 * band[:, None] + band[None])[None, :, :, None]
    flat = windows_of(region, window).squeeze(-1)
    return (flat[:, :, None] != flat[:, None]).float() * -100.0


class WindowAttention(nn.Module):
    """Attention in windows: (n, size, size, width) -> (n, size, size, width)."""

    index: torch.Tensor
    mask: torch.Tensor

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.window, self.shift = heads, size, window, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        biases = 0.02 * torch.randn((2 * window - 1) ** 2, heads)
        self.relative_position_bias_table = nn.Parameter(biases)
        self.register_buffer("index", relative_index(window).flatten(), persistent=False)
        if shift:
            mask = shift_mask(size, window, shift)
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        y = windows_of(x, self.window)
        length = self.window**2
        qkv = self.qkv(y).view(-1, length, 3, self.heads, y.shape[-1] // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.index].view(length, length, self.heads)
        scores = scores + bias.permute(2, 0, 1)
        if self.shift:
            mask = self.mask[:, None]
            apart = scores.view(-1, len(self.mask), self.heads, length, length) + mask
            scores = apart.view(-1, self.heads, length, length)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = join_windows(self.proj(y), self.window, self.size)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y


class SwinBlock(nn.Module):
    """Attention and a perceptron; a norm precedes each, and each adds its input."""

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, size, window, shift)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        output: torch.Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return output


class PatchMerging(nn.Module):
    """Joins 2 x 2 patches: (n, size, size, width) -> (n, size / 2, size / 2, 2 width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corners = [x[:, a::2, b::2] for b in (0, 1) for a in (0, 1)]
        output: torch.Tensor = self.reduction(self.norm(torch.cat(corners, -1)))
        return output


class Swin(nn.Module):
    """(n, 3, size, size) -> (n, classes)."""

    def __init__(
        self, size: int, patch: int, window: int, width: int, depths: Sequence[int], classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.norm0 = nn.LayerNorm(width)
        layers: list[nn.Module] = []
        size //= patch
        for number, depth in enumerate(depths):
            if number:
                layers.append(PatchMerging(width))
                size, width = size // 2, 2 * width
            for at in range(depth):
                # A single window has nothing to shift.
                shift = window // 2 if at % 2 and size > window else 0
                layers.append(SwinBlock(width, width // 32 or 1, size, window, shift))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layers(self.norm0(self.patches(x).permute(0, 2, 3, 1))))
        output: torch.Tensor = self.head(y.mean((1, 2)))
        return output


def _swin(
    size: int, patch: int, window: int, width: int, depths: Sequence[int], classes: int
) -> RandomModel:
    return RandomModel(
        lambda: Swin(size, patch, window, width, depths, classes), images(size, classes),
        32, optim.adamw(lr=1e-3, weight_decay=0.05),
    )  # fmt: skip


MODELS = {
    "swin": _swin(224, 4, 7, 96, (2, 2, 6, 2), 1000),  # Swin-T: 28 M parameters
    "swin-small": _swin(32, 2, 4, 32, (2, 2), 10),
}
