"""Operators that OpenCL devices run. Importing this package registers all of them."""

from . import (  # noqa: F401
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
    view,
)
