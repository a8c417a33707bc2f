"""Products and convolutions for GPUs, by tiles in local memory."""

from .convolution import forward, input_gradient, weight_gradient
from .matmul import tiled_product

__all__ = [
    "forward",
    "input_gradient",
    "tiled_product",
    "weight_gradient",
]
