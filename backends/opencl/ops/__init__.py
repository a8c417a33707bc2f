"""Operators that OpenCL devices run. Importing this package registers all of them."""

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
