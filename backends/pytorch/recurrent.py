"""LSTM layers in float32 on CPUs by oneDNN, up to twice as fast as a loop of small products."""

from __future__ import annotations

import torch

aten = torch.ops.aten

_LSTM = 2  # torch's number for LSTM, among the kinds of recurrent networks


def lstm_layer(
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `hetpipe.lstm_layer`; the last result is oneDNN's workspace for the backward."""
    x, w_ih, w_hh, h0, c0 = _row_major(x, w_ih, w_hh, h0, c0)
    with torch.enable_grad():  # without gradients, oneDNN returns no workspace
        y, _, last_c, workspace = aten.mkldnn_rnn_layer(
            x, w_ih, w_hh, *_biases(w_ih, bias), h0.unsqueeze(0), c0.unsqueeze(0),
            False, [], _LSTM, h0.shape[1], 1, True, False, False, True,
        )  # fmt: skip
    return y, last_c[0], x.new_empty(0), workspace.view(torch.float32)


def lstm_layer_backward(
    grad_y: torch.Tensor,
    grad_last_c: torch.Tensor | None,
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    last_c: torch.Tensor,
    _: torch.Tensor,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute `hetpipe.lstm_layer_backward` from the results of `lstm_layer`."""
    grad_y, x, w_ih, w_hh, h0, c0 = _row_major(grad_y, x, w_ih, w_hh, h0, c0)
    grad_last_c = None if grad_last_c is None else grad_last_c.contiguous().unsqueeze(0)
    grad_x, grad_w_ih, grad_w_hh, grad_bias, _, grad_h0, grad_c0 = aten.mkldnn_rnn_layer_backward(
        x, w_ih, w_hh, *_biases(w_ih, bias), h0.unsqueeze(0), c0.unsqueeze(0),
        y, y[-1:], last_c.unsqueeze(0), grad_y, None, grad_last_c,
        False, _LSTM, h0.shape[1], 1, True, True, False, [], False, workspace.view(torch.uint8),
    )  # fmt: skip
    return grad_x, grad_h0[0], grad_c0[0], grad_w_ih, grad_w_hh, grad_bias


def _row_major(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return contiguous tensors, because oneDNN gets addresses without strides."""
    return [tensor.contiguous() for tensor in tensors]


def _biases(w_ih: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two biases for oneDNN to add. Without biases it would return no bias gradient."""
    zeros = w_ih.new_zeros(w_ih.shape[0])
    return (zeros if bias is None else bias), zeros
