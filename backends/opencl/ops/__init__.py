"""The operators that OpenCL devices run. Importing this package registers them all."""

from . import (
    convolution,
    creation,
    elementwise,
    indexing,
    loss,
    matmul,
    normalization,
    pooling,
    reduction,
    view,
)

__all__ = [
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "loss",
    "matmul",
    "normalization",
    "pooling",
    "reduction",
    "view",
]
