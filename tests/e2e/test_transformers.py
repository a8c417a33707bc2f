"""Transformers as their library ships them train on torch in stages as they do without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import unpriced
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member

transformers = pytest.importorskip("transformers")

MINI_BATCH, MICROBATCHES, LENGTH, VOCABULARY = 8, 4, 16, 64


def gpt2() -> torch.nn.Module:
    """Two blocks; the embedding is tied to the output layer: the first stage and the last."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    """Two blocks with a padding mask, which every block reads."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def class_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, y)


def text(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (MINI_BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def padded(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (MINI_BATCH, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (MINI_BATCH, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = torch.randint(0, 4, (MINI_BATCH,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask}, labels


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "loss_fn", "batch"),
    [(gpt2, language_loss, text), (bert, class_loss, padded)],
    ids=["gpt2", "bert"],
)
def test_transformer_equals_unpartitioned(
    make: Callable[[], torch.nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batch: Callable[[torch.Generator], tuple[Any, Any]],
    stages: int,
) -> None:
    torch.manual_seed(3)
    model = make()
    generator = torch.Generator().manual_seed(4)
    batches = [batch(generator) for _ in range(20)]

    eager = copy.deepcopy(model)
    expected, gradients = train(
        eager, loss_fn, batches, MICROBATCHES, torch.optim.AdamW(eager.parameters(), lr=1e-3)
    )

    members = tuple(Member(name, "pytorch:cpu:0") for name in "abc"[:stages])
    captured = Captured(model, loss_fn, batches[0])
    plan, costs = unpriced(captured, "abc"[:stages], "1f1b", MINI_BATCH, MICROBATCHES)
    with hp.Pipeline(
        model,
        loss_fn,
        batches[0],
        cluster=Cluster(members=members, transport="local"),
        optimizer=hp.optim.adamw(lr=1e-3),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        _, found = pipe.gradients(*batches[0])
        for key, gradient in gradients.items():
            error = (found[key] - gradient).norm().item()
            assert error <= 1e-4 * gradient.norm().item() + 1e-6, key
        losses = [pipe.step(x, y) for x, y in batches]
    assert losses == pytest.approx(expected, rel=1e-4)
