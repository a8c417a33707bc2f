"""The sizes of a convolution, whatever kernels compute it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """A plain convolution: x [N][in_channels][size] -> y [N][out_channels][out_size]."""

    images: int
    groups: int
    in_channels: int
    out_channels: int
    size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def channels(self, flipped: bool = False) -> tuple[int, int]:
        """(lanes, depth): output and input channels of a group; exchanged if `flipped`."""
        lanes, depth = self.out_channels // self.groups, self.in_channels // self.groups
        return (depth, lanes) if flipped else (lanes, depth)
