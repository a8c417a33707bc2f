"""Lets the fastest kernels compute hetpipe's operators and batch norms, by the type of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .attention import (
    attention,
    attention_backward,
    masked_attention,
    masked_attention_backward,
)
from .masks import best_mask
from .norms import cudnn_norm, cudnn_norm_backward, cudnn_norm_without_memory
from .recurrent import cudnn_lstm, cudnn_lstm_backward, onednn_lstm, onednn_lstm_backward

aten, own = torch.ops.aten, torch.ops.hetpipe

_ONEDNN: dict[Any, Callable[..., Any]] = {
    own.lstm_layer.default: onednn_lstm,
    own.lstm_layer_backward.default: onednn_lstm_backward,
}
_CUDA: dict[Any, Callable[..., Any]] = {
    own.attention.default: attention,
    own.attention_backward.default: attention_backward,
    own.masked_attention.default: masked_attention,
    own.masked_attention_backward.default: masked_attention_backward,
    own.lstm_layer.default: cudnn_lstm,
    own.lstm_layer_backward.default: cudnn_lstm_backward,
}
_NORMS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: cudnn_norm,
    aten._native_batch_norm_legit.no_stats: cudnn_norm_without_memory,
    aten.native_batch_norm_backward.default: cudnn_norm_backward,
}
_WITH_WORKSPACE = (onednn_lstm, onednn_lstm_backward, cudnn_lstm, cudnn_lstm_backward)


def by_library(graph: fx.Graph, kernels: str) -> None:
    """Replace operators of hetpipe, and batch norms, by the fastest functions for a device type.

    oneDNN, if torch has it, computes the float32 LSTM layers of CPUs.
    """
    functions = _CUDA if kernels == "cuda" else {}
    if kernels == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        functions = _ONEDNN
    for node in graph.nodes:
        if node.target is own.keep_mask.default:
            node.target = best_mask(kernels)
        elif node.target in _NORMS and kernels == "cuda":
            node.meta["functional"] = node.target  # a compiler has its own kernels for norms
            node.target = _NORMS[node.target]
        elif node.target in functions and (functions is _CUDA or _is_float32(node)):
            node.target = functions[node.target]
            # A compiler knows nothing of the workspace that a layer leaves to its backward.
            node.meta["opaque"] = node.target in _WITH_WORKSPACE


def _is_float32(node: fx.Node) -> bool:
    return bool(node.all_input_nodes[0].meta["val"].dtype is torch.float32)
