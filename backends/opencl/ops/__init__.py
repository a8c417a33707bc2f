"""The operators that OpenCL devices run. Importing this package registers them all."""

from . import (
    activations,
    attention,
    convolution,
    creation,
    division,
    elementwise,
    indexing,
    loss,
    matmul,
    normalization,
    pooling,
    recurrent,
    reduction,
    scatter,
    view,
)

__all__ = [
    "activations",
    "attention",
    "convolution",
    "creation",
    "division",
    "elementwise",
    "indexing",
    "loss",
    "matmul",
    "normalization",
    "pooling",
    "recurrent",
    "reduction",
    "scatter",
    "view",
]
