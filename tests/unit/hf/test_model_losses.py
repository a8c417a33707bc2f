"""Losses of Hugging Face models equal the losses that the models compute from labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hetpipe as hp
from hetpipe.hf.recipe import loss_of

transformers = pytest.importorskip("transformers")

SIZES = [3, 1, 2, 1]  # of uneven micro-batches
LENGTH, VOCABULARY, CLASSES = 12, 32, 4
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": LENGTH,
}  # fmt: skip


def gpt2(**settings: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=None, eos_token_id=None, **settings,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(head: str, **settings: Any) -> Any:
    config = transformers.BertConfig(**BERT, **settings)
    return getattr(transformers, head)(config)


def padded() -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs, whose samples have unlike lengths, and their tokens as labels."""
    ids = torch.randint(0, VOCABULARY, (sum(SIZES), LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (sum(SIZES), 1))
    return {"input_ids": ids, "attention_mask": mask.long()}, ids.where(mask, -100)


def masked() -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs, and labels for some of the tokens; one sample has none."""
    x, labels = padded()
    chosen = torch.rand(labels.shape) < 0.3
    chosen[3] = False  # a whole micro-batch
    return x, labels.where(chosen, -100)


def labelled(labels: Callable[[], Tensor]) -> Callable[[], tuple[dict[str, Tensor], Tensor]]:
    return lambda: (padded()[0], labels())


CLASSIFIER = "BertForSequenceClassification"
CASES: dict[str, tuple[Any, Any, Any]] = {
    "causal": (hp.hf.causal_lm_loss, gpt2, padded),
    "masked": (hp.hf.masked_lm_loss, lambda: bert("BertForMaskedLM"), masked),
    "tokens": (
        hp.hf.masked_lm_loss,
        lambda: bert("BertForTokenClassification", num_labels=CLASSES),
        labelled(lambda: masked()[1].clamp(max=CLASSES - 1)),
    ),
    "classes": (
        hp.hf.classification_loss,
        lambda: bert(CLASSIFIER, num_labels=CLASSES),
        labelled(lambda: torch.randint(0, CLASSES, (sum(SIZES),))),
    ),
    "several labels": (
        hp.hf.classification_loss,
        lambda: bert(CLASSIFIER, num_labels=CLASSES),
        labelled(lambda: torch.randint(0, 2, (sum(SIZES), CLASSES)).double()),
    ),
    "regression": (
        hp.hf.classification_loss,
        lambda: bert(CLASSIFIER, num_labels=1),
        labelled(lambda: torch.randn(sum(SIZES), dtype=torch.float64)),
    ),
    "regression of a column": (
        hp.hf.classification_loss,
        lambda: bert(CLASSIFIER, num_labels=1),
        labelled(lambda: torch.randn(sum(SIZES), 1, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_have_the_loss_of_the_model(name: str) -> None:
    loss_fn, make, data = CASES[name]
    torch.manual_seed(0)
    model, (x, labels) = make().double().eval(), data()
    wanted = model(**x, labels=labels)
    wanted.loss.backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters()}
    model.zero_grad()
    parts = list(micro_batches(x, labels))
    found = [loss_fn(model(**part), part_labels) for part, part_labels in parts]
    total, count = sum(each for each, _ in found), sum(each for _, each in found)
    # causal models compute their own loss in float32
    rtol = 1e-6 if name == "causal" else 1e-12
    torch.testing.assert_close((total / count).to(wanted.loss), wanted.loss, rtol=rtol, atol=0)
    (total / count).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-5, atol=rtol)


def micro_batches(x: dict[str, Tensor], labels: Tensor) -> Iterator[tuple[dict[str, Tensor], Any]]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    for lo, hi in zip([0, *ends[:-1]], ends, strict=True):
        yield {key: value[lo:hi] for key, value in x.items()}, labels[lo:hi]


@pytest.mark.parametrize("loss_fn", [hp.hf.causal_lm_loss, hp.hf.masked_lm_loss])
def test_every_form_of_an_output_is_taken(loss_fn: Any) -> None:
    torch.manual_seed(0)
    model, (x, labels) = gpt2().eval(), padded()
    output = model(**x)
    wanted = loss_fn(output, labels)
    for form in (output.to_tuple(), dict(output), output.logits, model(**x, return_dict=False)):
        assert loss_fn(form, labels) == wanted


def test_wrong_outputs_and_labels_are_named() -> None:
    x, labels = padded()
    output = bert("BertModel")(**x)
    with pytest.raises(hp.HetpipeError, match="without logits: use a model with a head"):
        hp.hf.causal_lm_loss(output, labels)
    logits = bert("BertForMaskedLM")(**x)
    with pytest.raises(hp.HetpipeError, match=r"\[7, 12, 32\] and the labels \[7\].*\[7, 12\]"):
        hp.hf.masked_lm_loss(logits, labels[:, 0])


def test_an_encoder_decoder_has_the_loss_of_its_labels() -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    x, labels = padded()
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    total, count = loss_of(model, 0.0)(model(**x, decoder_input_ids=shifted), labels)
    torch.testing.assert_close(total / count, model(**x, labels=labels).loss)
