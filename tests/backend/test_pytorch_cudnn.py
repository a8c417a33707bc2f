"""LSTM layers by cuDNN, whose functions are formulas here: no machine of the tests has a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hetpipe.backends.pytorch import recurrent
from hetpipe.backends.pytorch.choice import why_eager
from hetpipe.backends.pytorch.program import Program
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.graph import canonical
from hetpipe.sdk.operators.recurrent import layer, layer_backward

LAYER = {
    "mode": 2, "hidden_size": 4, "proj_size": 0, "num_layers": 1, "batch_first": False,
    "dropout": 0.0, "train": True, "bidirectional": False, "batch_sizes": [],
    "dropout_state": None,
}  # fmt: skip
"""The arguments of a layer with 4 units."""


def as_bytes(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)


def forward(
    x: Tensor, weights: list[Tensor], stride: int, flat: None, h0: Tensor, c0: Tensor, **how: Any
) -> tuple[Tensor, ...]:
    """Compute as `torch._cudnn_rnn` does; the reserve is the bytes of the states and gates."""
    assert (stride, how) == (4, LAYER)
    assert all(tensor.is_contiguous() for tensor in (h0, c0, *weights))
    w_ih, w_hh, *biases = weights
    y, last_c, c, gates = layer(x, h0[0], c0[0], w_ih, w_hh, biases[0] + biases[1])
    flat_weights = torch.cat([weight.flatten() for weight in weights])
    return y, y[-1:].clone(), last_c.unsqueeze(0), as_bytes(c, gates), flat_weights


def backward(
    x: Tensor, weights: list[Tensor], stride: int, flat: Tensor, h0: Tensor, c0: Tensor, y: Tensor,
    grad_y: Tensor, grad_h: None, grad_c: Tensor | None, *, reserve: Tensor,
    output_mask: list[bool], **how: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute as `torch._cudnn_rnn_backward` does, which overwrites the reserve."""
    assert (stride, output_mask, how) == (4, [True] * 4, LAYER)
    assert torch.equal(flat, torch.cat([weight.flatten() for weight in weights]))
    assert y.is_contiguous()
    kept = reserve.view(x.dtype).clone()
    reserve.fill_(113)
    c, gates = kept[: y.numel()].view(y.shape), kept[y.numel() :].view(*y.shape[:2], -1)
    grad_last_c = None if grad_c is None else grad_c[0]
    w_ih, w_hh, *_ = weights
    gradients = layer_backward(
        grad_y, grad_last_c, x, h0[0], c0[0], w_ih, w_hh, None, y, c[-1], c, gates
    )
    by_x, by_h0, by_c0, *by_weights = gradients
    return by_x, by_h0.unsqueeze(0), by_c0.unsqueeze(0), [*by_weights, by_weights[-1].clone()]


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(_cudnn_rnn=forward, _cudnn_rnn_backward=backward)
    monkeypatch.setattr(recurrent, "aten", kernels)
    monkeypatch.setattr(recurrent, "_has_cudnn", lambda x: True)


def inputs_of(dtype: torch.dtype, biased: bool) -> list[Tensor | None]:
    """Return x [5, 3, 6], h0, c0, w_ih, w_hh and bias, of a layer with 4 units."""
    torch.manual_seed(0)
    shapes = [(5, 3, 6), (3, 4), (3, 4), (16, 6), (16, 4), (16,)]
    inputs: list[Tensor | None] = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return inputs if biased else [*inputs[:5], None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("has_grad_c", [True, False])
def test_a_layer_equals_its_formula(dtype: torch.dtype, biased: bool, has_grad_c: bool) -> None:
    inputs: list[Any] = inputs_of(dtype, biased)
    found, wanted = recurrent.cudnn_lstm(*inputs), layer(*inputs)
    torch.testing.assert_close(found[:2], wanted[:2])
    grads = torch.randn(5, 3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    given = [grads[0], grads[1] if has_grad_c else None, *inputs]
    gradients = layer_backward(*given, *wanted)
    for _ in range(2):  # a second run needs the reserve as well
        torch.testing.assert_close(recurrent.cudnn_lstm_backward(*given, *found), gradients)


def test_the_programs_of_a_card_call_cudnn() -> None:
    """The program of the forward gives its workspaces to the program of the backward."""
    inputs: list[Any] = inputs_of(torch.float32, True)
    own, cpu, none = torch.ops.hetpipe, torch.device("cpu"), frozenset[int]()

    def program(function: Any, *inputs: Tensor) -> Program:
        return Program(canonical(make_fx(function)(*inputs)), none, cpu, "card", "cuda")

    results = layer(*inputs)
    ahead = program(lambda *given: tuple(own.lstm_layer(*given)), *inputs)
    given = [torch.randn(5, 3, 4), torch.randn(3, 4), *inputs]
    back = program(lambda *all: tuple(own.lstm_layer_backward(*all)), *given, *results)
    found = ahead.call(inputs)
    assert found[3].dtype is torch.uint8
    torch.testing.assert_close(tuple(back.call([*given, *found])), layer_backward(*given, *results))
    for each in (ahead, back):
        assert "cudnn_lstm" in why_eager(each, checks=False)
