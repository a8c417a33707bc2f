"""Products and convolutions for GPUs, by tiles in local memory."""

from .convolution import bias_gradient, forward, input_gradient, weight_gradient
from .matmul import tiled_product

__all__ = [
    "bias_gradient",
    "forward",
    "input_gradient",
    "tiled_product",
    "weight_gradient",
]
