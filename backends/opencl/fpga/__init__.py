"""Products and convolutions for FPGAs: dataflows of single work-items, joined by channels."""

from .convolution import forward, input_gradient, weight_gradient
from .matmul import systolic_product
from .rows import batch_norm, layer_norm, softmax

__all__ = [
    "batch_norm",
    "forward",
    "input_gradient",
    "layer_norm",
    "softmax",
    "systolic_product",
    "weight_gradient",
]
