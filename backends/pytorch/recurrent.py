"""LSTM layers by libraries: oneDNN on CPUs in float32, cuDNN on NVIDIA's cards.

oneDNN is up to twice as fast as a loop of small products. cuDNN needs a few launches for a layer,
where the loop needs several for each time step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from hetpipe.sdk.operators.recurrent import layer, layer_backward

aten = torch.ops.aten

_LSTM = 2  # torch's number for LSTM, among the kinds of recurrent networks


def onednn_lstm(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.lstm_layer`; the last result is oneDNN's workspace for the backward."""
    x, w_ih, w_hh, h0, c0 = _row_major(x, w_ih, w_hh, h0, c0)
    with torch.enable_grad():  # without gradients, oneDNN returns no workspace
        y, _, last_c, workspace = aten.mkldnn_rnn_layer(
            x, w_ih, w_hh, *_biases(w_ih, bias), *_states(h0, c0),
            False, [], _LSTM, h0.shape[1], 1, True, False, False, True,
        )  # fmt: skip
    return y, last_c[0], x.new_empty(0), workspace.view(torch.float32)


def onednn_lstm_backward(
    grad_y: Tensor,
    grad_last_c: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Tensor | None,
    y: Tensor,
    last_c: Tensor,
    _: Tensor,
    workspace: Tensor,
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.lstm_layer_backward` from the results of `onednn_lstm`."""
    grad_y, x, w_ih, w_hh, h0, c0 = _row_major(grad_y, x, w_ih, w_hh, h0, c0)
    grad_last_c = None if grad_last_c is None else grad_last_c.contiguous().unsqueeze(0)
    grad_x, grad_w_ih, grad_w_hh, grad_bias, _, grad_h0, grad_c0 = aten.mkldnn_rnn_layer_backward(
        x, w_ih, w_hh, *_biases(w_ih, bias), *_states(h0, c0),
        y, y[-1:], last_c.unsqueeze(0), grad_y, None, grad_last_c,
        False, _LSTM, h0.shape[1], 1, True, True, False, [], False, workspace.view(torch.uint8),
    )  # fmt: skip
    return grad_x, grad_h0[0], grad_c0[0], grad_w_ih, grad_w_hh, grad_bias


def cudnn_lstm(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.lstm_layer`; the last results are cuDNN's copy of the weights and reserve.

    Without cuDNN, as on AMD's cards, the operator's formula computes it.
    """
    if not _has_cudnn(x):
        return layer(x, h0, c0, w_ih, w_hh, bias)
    weights = [w_ih, w_hh, *_biases(w_ih, bias)]
    y, _, last_c, reserve, flat = aten._cudnn_rnn(
        x, weights, len(weights), None, *_states(h0, c0), **_cudnn_layer(h0)
    )
    return y, last_c[0], flat, reserve


def cudnn_lstm_backward(
    grad_y: Tensor,
    grad_last_c: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Tensor | None,
    y: Tensor,
    last_c: Tensor,
    flat: Tensor,
    reserve: Tensor,
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.lstm_layer_backward` from the results of `cudnn_lstm`."""
    if not _has_cudnn(x):
        return layer_backward(
            grad_y, grad_last_c, x, h0, c0, w_ih, w_hh, bias, y, last_c, flat, reserve
        )
    weights = [w_ih, w_hh, *_biases(w_ih, bias)]
    grad_last_c = None if grad_last_c is None else grad_last_c.unsqueeze(0)
    grad_x, grad_h0, grad_c0, (grad_w_ih, grad_w_hh, grad_bias, _) = aten._cudnn_rnn_backward(
        x, weights, len(weights), flat, *_states(h0, c0), y, grad_y, None, grad_last_c,
        **_cudnn_layer(h0), reserve=reserve.clone(),  # cuDNN overwrites it
        output_mask=[True] * 4,
    )  # fmt: skip
    return grad_x, grad_h0[0], grad_c0[0], grad_w_ih, grad_w_hh, grad_bias


def _has_cudnn(x: Tensor) -> bool:
    """Return whether cuDNN computes layers of this input; torch calls AMD's library cuDNN too."""
    return torch.version.hip is None and bool(cudnn.is_acceptable(x))  # type: ignore[no-untyped-call]


def _cudnn_layer(h0: Tensor) -> dict[str, Any]:
    """Return cuDNN's arguments for one layer, forward in time."""
    return {
        "mode": _LSTM, "hidden_size": h0.shape[1], "proj_size": 0, "num_layers": 1,
        "batch_first": False, "dropout": 0.0, "train": True, "bidirectional": False,
        "batch_sizes": [], "dropout_state": None,
    }  # fmt: skip


def _states(h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
    return h0.unsqueeze(0), c0.unsqueeze(0)


def _row_major(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors, because oneDNN gets addresses without strides."""
    return [tensor.contiguous() for tensor in tensors]


def _biases(w_ih: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two biases for the library to add. Without biases it returns no bias gradient."""
    zeros = w_ih.new_zeros(w_ih.shape[0])
    return (zeros if bias is None else bias), zeros
