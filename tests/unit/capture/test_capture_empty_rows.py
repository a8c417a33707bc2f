"""Attention rows without any key give zeros and no gradient, as in torch, on every backend."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import Stages, eager, total
from test_capture_devices import DEVICES, SHARES, SIZES, _run_on, opened
from torch import nn

from hetpipe.capture import Captured
from hetpipe.sdk.graph import graph_calls, operator_name
from hetpipe.sdk.host.registry import get_backend

SAMPLES, LENGTH, WIDTH = sum(SIZES), 5, 8
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


class Plain(nn.Module):
    """`scaled_dot_product_attention` with a mask from the batch, optionally with a trained bias in
    it.
    """

    def __init__(self, additive: bool, biased: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
        self.additive = additive
        self.bias = nn.Parameter(torch.randn(2, LENGTH, LENGTH)) if biased else None

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(len(x), LENGTH, 6, WIDTH // 2).transpose(1, 2)
        q, k, v = parts.split(2, 1)
        mask = seen[:, None]
        if self.additive:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -math.inf)
        if self.bias is not None:
            mask = mask + self.bias
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Masked(nn.Module):
    """torch's self-attention with a causal mask and a padding mask."""

    def __init__(self, encoder: bool) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        if encoder:
            self.layer: nn.Module = nn.TransformerEncoderLayer(
                WIDTH, 2, 16, dropout=0.0, batch_first=True
            )
        else:
            self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = encoder

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        padding = ~seen[:, -1]
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        h = self.first(x)
        if self.encoder:
            y = self.layer(h, src_mask=future, src_key_padding_mask=padding)
        else:
            masks = {"attn_mask": future, "key_padding_mask": padding}
            y = self.layer(h, h, h, need_weights=False, **masks)[0]
        result: torch.Tensor = self.out(y)
        return result


def batch(wide: bool = False) -> Batch:
    """Return samples padded on the left, some by padding alone, with a causal mask."""
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    padding = torch.arange(SAMPLES) % (LENGTH + 1)
    present = torch.arange(LENGTH) >= padding[:, None]
    seen = present[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    target = torch.randn(SAMPLES, LENGTH, 3)
    return ((x.double(), seen), target.double()) if wide else ((x, seen), target)


MODELS = {
    "boolean": lambda: Plain(additive=False),
    "additive": lambda: Plain(additive=True),
    "additive, with a trained bias": lambda: Plain(additive=True, biased=True),
    "multihead": lambda: Masked(encoder=False),
    "encoder layer": lambda: Masked(encoder=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_without_keys(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    captured = Captured(model, F.mse_loss, batch())
    exact = copy.deepcopy(model).double()
    loss, _, expected = eager(exact, F.mse_loss, batch(wide=True), SIZES, SHARES)
    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in expected.values())
    for device_id in DEVICES:
        device = opened(device_id)
        tables: list[Any] = [get_backend(device.info.backend).decompositions()] * 2
        graphs = captured.stage_graphs([1], tables, SIZES, None)
        state = Stages(captured, graphs, execute=functools.partial(_run_on, device))
        found = total(state.step(batch(), SIZES, SHARES))
        assert state.loss == pytest.approx(loss, rel=1e-5), device_id
        assert found.keys() == expected.keys()
        largest = max(float(value.abs().max()) for value in expected.values())
        for key, value in expected.items():
            error = float((found[key].double() - value).abs().max())
            assert error <= 1e-5 * largest, (device_id, key, error, largest)


def test_masks_become_operands_of_one_operator() -> None:
    for name, model in MODELS.items():
        captured = Captured(model(), F.mse_loss, batch())
        (graphs,) = captured.stage_graphs([], [{}], [SAMPLES], None)
        passes = graphs.passes[SAMPLES]
        assert passes.backward is not None
        for program in (passes.forward, passes.backward):
            names = [operator_name(node) for node in graph_calls(program.graph)]
            assert len([call for call in names if "masked_attention" in call]) == 1, name
            assert not [call for call in names if "softmax" in call], name
