"""Models of the transformers library, unchanged, train in stages as without stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import RUNTIMES, Run, check_equal, start_crew

import hetpipe as hp
from hetpipe.crew.crew import Crew

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

MINI_BATCH, MICROBATCHES, LENGTH, VOCABULARY, CLASSES = 8, 4, 16, 64, 4
DISTINCT, STEPS = 2, 20  # number of mini-batches, which are learnt by heart
LEARNING_RATE = 5e-3

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def gpt2() -> torch.nn.Module:
    """Return two blocks; the first and the last stage share the tied embedding."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    """Return two blocks with a padding mask, which every block reads."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def class_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, y)


def text(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (MINI_BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def padded_text(generator: torch.Generator) -> Batch:
    x, y = text(generator)
    return {**x, "attention_mask": mask(generator)}, y


def classified(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (MINI_BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (MINI_BATCH,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask(generator)}, labels


def mask(generator: torch.Generator) -> torch.Tensor:
    """Return 1 for the first 4 or more of a sample's tokens and 0 for its padding."""
    lengths = torch.randint(4, LENGTH + 1, (MINI_BATCH, 1), generator=generator)
    return (torch.arange(LENGTH) < lengths).long()


def run_of(
    model: Callable[[], torch.nn.Module],
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    batch: Callable[[torch.Generator], Batch],
) -> Run:
    generator = torch.Generator().manual_seed(4)
    return Run(
        model, loss_fn, [batch(generator) for _ in range(DISTINCT)] * (STEPS // DISTINCT),
        MICROBATCHES, hp.optim.adamw(lr=LEARNING_RATE),
        lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    )  # fmt: skip


RUNS = {
    "gpt2": run_of(gpt2, language_loss, text),
    "gpt2-padded": run_of(gpt2, language_loss, padded_text),
    "bert": run_of(bert, class_loss, classified),
}
TORCH_ROWS = [("pytorch",) * stages for stages in (1, 2, 3)]
OPENCL_ROWS = [(runtime,) * stages for runtime in RUNTIMES for stages in (1, 2, 3)]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with start_crew([*TORCH_ROWS, *OPENCL_ROWS]) as started:
        yield started


@pytest.mark.wide
@pytest.mark.parametrize("row", TORCH_ROWS, ids="-".join)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_on_torch_equals_unpartitioned(crew: Crew, name: str, row: Sequence[str]) -> None:
    check_equal(crew, row, RUNS[name])


@pytest.mark.wide
@pytest.mark.parametrize("row", OPENCL_ROWS, ids="-".join)
@pytest.mark.parametrize("name", ["gpt2", "gpt2-padded", "bert"])
def test_on_opencl_equals_unpartitioned(crew: Crew, name: str, row: Sequence[str]) -> None:
    check_equal(crew, row, RUNS[name])


@pytest.mark.parametrize("name", ["gpt2-padded", "bert"])
def test_outputs_keep_their_class(name: str) -> None:
    run = RUNS[name]
    model, (x, y) = run.model(), run.batches[0]
    model.train()
    with hp.Pipeline(
        model, run.loss_fn, (x, y), cluster=hp.Cluster.local(devices=["pytorch:cpu:0"] * 2),
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), microbatches=2,
    ) as pipe:  # fmt: skip
        pipe.step(x, y)
        found = pipe.predict(x)
        mean = pipe.evaluate([(x, y)]).loss
        pipe.copy_to(model)
    wanted = model.eval()(**x)
    assert type(found) is type(wanted)
    assert list(found) == list(wanted)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert mean == pytest.approx(run.loss_fn(wanted, y).item(), rel=1e-5)
