"""A causal transformer trains in stages on every backend as unpartitioned torch trains it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from plans import unpriced
from reference import train
from test_parity import find_opencl
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.sdk.graph import graph_calls, operator_name
from hetpipe.sdk.registry import get_backend

MINI_BATCH, MICROBATCHES, LENGTH, VOCABULARY = 8, 4, 13, 40
WIDTH, HEADS, STEPS = 32, 2, 20
TOLERANCE = 1e-4


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens to logits; the embedding is the output layer's weight, in the last stage again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(x) + self.places(torch.arange(LENGTH))
        return self.head(self.norm(self.blocks(embedded)))


def loss_fn(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, VOCABULARY, (MINI_BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def fresh() -> nn.Module:
    """The same initial weights every time."""
    torch.manual_seed(5)
    return Transformer()


@cache
def captured() -> Captured:
    return Captured(fresh(), loss_fn, batch(torch.Generator().manual_seed(6)))


def operators(backend: str) -> tuple[set[str], set[str]]:
    """Names in the forward and in the backward of the whole model, as a backend gets them."""
    table = get_backend(backend).decompositions()
    (stage,) = captured().stage_graphs([], [table], [2], None)
    passes = stage.passes[2]
    assert passes.backward is not None
    forward, backward = (
        {operator_name(node) for node in graph_calls(program.graph)}
        for program in (passes.forward, passes.backward)
    )
    return forward, backward


@pytest.mark.parametrize("backend", ["pytorch", "opencl"])
def test_attention_stays_one_operator(backend: str) -> None:
    forward, backward = operators(backend)
    assert "hetpipe.attention.default" in forward
    assert "hetpipe.attention_backward.default" in backward
    assert "hetpipe.attention.default" not in backward


def test_the_reference_gets_attention_decomposed() -> None:
    forward, backward = operators("numpy")
    assert not any(name.startswith("hetpipe.") for name in forward | backward)


@pytest.mark.parametrize("backend", ["pytorch", "opencl"])
def test_no_scores_are_saved(backend: str) -> None:
    """The backward makes them again from the logarithms of the rows' sums."""
    table = get_backend(backend).decompositions()
    (stage,) = captured().stage_graphs([], [table], [2], None)
    shapes = [slot.shape for slot in stage.passes[2].forward.outputs if slot.role == "saved"]
    assert not [shape for shape in shapes if shape[-2:] == (LENGTH, LENGTH)]
    assert (2, HEADS, LENGTH) in shapes


@pytest.mark.parametrize(
    "backends",
    [
        ("pytorch",), ("opencl",), ("numpy",), ("pytorch", "opencl"),
        ("opencl", "numpy", "pytorch"), ("numpy", "opencl", "opencl"),
    ],
    ids="-".join,
)  # fmt: skip
def test_pipeline_equals_unpartitioned(backends: Sequence[str]) -> None:
    opencl = find_opencl()
    if opencl is None and "opencl" in backends:
        pytest.skip("no OpenCL device: install the extra `emulators` or pocl-opencl-icd")
    device = {"pytorch": "pytorch:cpu:0", "numpy": "numpy:cpu:0", "opencl": opencl or ""}
    names = "abc"[: len(backends)]
    members = tuple(Member(n, device[b]) for n, b in zip(names, backends, strict=True))
    model = fresh()
    generator = torch.Generator().manual_seed(6)
    batches = [batch(generator) for _ in range(STEPS)]

    eager = copy.deepcopy(model)
    expected, gradients = train(
        eager, loss_fn, batches, MICROBATCHES, torch.optim.SGD(eager.parameters(), lr=0.1)
    )
    plan, costs = unpriced(captured(), names, "1f1b", MINI_BATCH, MICROBATCHES)
    with hp.Pipeline(
        model,
        loss_fn,
        batches[0],
        cluster=Cluster(members=members, transport="local"),
        optimizer=hp.optim.sgd(lr=0.1),
        captured=captured(),
        plan=plan,
        costs=costs,
    ) as pipe:
        _, found = pipe.gradients(*batches[0])
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = (found[key] - gradient).norm().item()
            assert error <= TOLERANCE * gradient.norm().item() + 1e-6, (key, error)
        losses = [pipe.step(x, y) for x, y in batches]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
