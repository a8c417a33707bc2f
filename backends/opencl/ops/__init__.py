"""The operators that OpenCL devices run. Importing this package registers them all."""

from . import (
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
