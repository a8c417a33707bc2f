"""Operators that OpenCL devices run. Importing this package registers all of them."""

from . import (  # noqa: F401
    activations,
    attention,
    attention_on_cards,
    convolution,
    creation,
    division,
    elementwise,
    indexing,
    loss,
    loss_on_cards,
    matmul,
    normalization,
    normalization_on_cards,
    pooling,
    pooling_on_cards,
    recurrent,
    recurrent_on_cards,
    reduction,
    view,
)
