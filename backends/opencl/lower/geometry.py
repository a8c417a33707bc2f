"""The sizes of a convolution, for the kernels of all families."""

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

    @property
    def arguments(self) -> dict[str, int]:
        """Arguments for the parameters `SHAPE` of `kernels/patches.cl`."""
        return {
            "images": self.images, "groups": self.groups, "in_channels": self.in_channels,
            "out_channels": self.out_channels, "height": self.size[0], "width": self.size[1],
            "out_height": self.out_size[0], "out_width": self.out_size[1],
            "kernel_h": self.kernel[0], "kernel_w": self.kernel[1], "stride_h": self.stride[0],
            "stride_w": self.stride[1], "pad_h": self.padding[0], "pad_w": self.padding[1],
            "dilation_h": self.dilation[0], "dilation_w": self.dilation[1],
        }  # fmt: skip

    def channels(self, flipped: bool = False) -> tuple[int, int]:
        """Return (output channels, input channels) of a group; exchanged if `flipped`."""
        lanes, depth = self.out_channels // self.groups, self.in_channels // self.groups
        return (depth, lanes) if flipped else (lanes, depth)
