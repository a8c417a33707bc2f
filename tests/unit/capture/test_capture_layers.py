"""Layers: where they begin, their names, and the bytes that cross between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture_models import Residual, captured, make
from torch import nn

from hetpipe.capture import Captured, capture


def names(model: Captured) -> list[str]:
    return [layer.name for layer in model.layer_graph(8).layers]


def test_convolution_norm_and_activation_are_one_layer() -> None:
    graph = captured("residual").layer_graph(8)
    assert [layer.name for layer in graph.layers] == ["stem", "conv1", "conv2", "head"]
    assert graph.layers[0].parameters == ("stem.weight", "stem.bias", "bn.weight", "bn.bias")
    assert graph.layers[0].params_nbytes == 8 * (3 * 4 * 9 + 4 + 4 + 4)
    assert "aten.max_pool2d.default" in graph.layers[0].operators
    assert "aten.cross_entropy_loss.default" in graph.layers[-1].operators


def test_chosen_operators_begin_layers() -> None:
    model, loss_fn, example = make("residual")
    pooled = Captured(model, loss_fn, example, starting=("aten.max_pool2d.default",))
    graph = pooled.layer_graph(8)
    assert len(graph.layers) == 5
    assert graph.layers[0].operators[-1] != "aten.max_pool2d.default"
    assert graph.layers[1].operators[0] == "aten.max_pool2d.default"
    assert not graph.layers[1].parameters


def test_cut_bytes_count_skips() -> None:
    """After stem x crosses (8 x 4 x 3 x 3 doubles); after conv1, x and y; after conv2, the pooled
    sum."""
    one = 8 * 4 * 9 * 8
    assert captured("residual").layer_graph(8).cut_nbytes == (one, 2 * one, 8 * 4 * 8)
    assert captured("residual").layer_graph(4).cut_nbytes == (one // 2, one, 4 * 4 * 8)


def test_a_module_called_twice_is_two_layers() -> None:
    """Calls that update the same statistics stay in one layer."""
    assert names(captured("repeated")) == ["entry", "shared", "shared#2", "head"]


def test_attention_is_a_layer() -> None:
    expected = ["embed"]
    for index in range(2):
        expected += [f"layers.{index}.{part}" for part in ("self_attn", "linear1", "linear2")]
    assert names(captured("attention")) == [*expected, "head"]


def test_tables_looked_up_by_constants_are_layers() -> None:
    assert names(captured("gpt2"))[:3] == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0.attn.c_attn",
    ]


def test_a_model_without_matrices_is_one_layer() -> None:
    model = capture(nn.LayerNorm(4), F.mse_loss, (torch.randn(2, 4), torch.randn(2, 4)))
    assert [layer.name for layer in model.layer_graph(2).layers] == ["LayerNorm"]


@pytest.mark.slow
def test_the_fingerprint_depends_only_on_structure() -> None:
    torch.manual_seed(5)
    batch = make("residual")[2]
    other = Captured(Residual().double(), F.cross_entropy, batch)
    assert other.fingerprint == captured("residual").fingerprint
    wider = Residual().double()
    wider.head = nn.Linear(4, 6).double()
    assert Captured(wider, F.cross_entropy, batch).fingerprint != other.fingerprint
    assert Captured(Residual().double(), F.mse_loss, (batch[0], torch.randn(12, 5).double())) \
        .fingerprint != other.fingerprint  # fmt: skip


@pytest.mark.parametrize("samples", [1, 12, 30])
def test_any_number_of_samples(samples: int) -> None:
    graph = captured("mlp").layer_graph(samples)
    assert graph.samples == samples
    assert graph.cut_nbytes == (samples * 8 * 8, samples * 7 * 8)
    assert captured("mlp").layer_graph(samples) is graph
