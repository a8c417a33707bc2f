"""The text workloads: their batches, their validation, and their learning."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from hetpipe import optim
from hetpipe.train.eager import Eager
from hetpipe.zoo import Workload, load_workload
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.lstm import Recurrent
from hetpipe.zoo.text import VOCABULARY, corpus, encode_corpus, language, token_loss, windows

LENGTH = 16


def test_text_is_coded_without_loss_and_split_by_position() -> None:
    pairs, kept, held = encode_corpus()
    text = corpus()
    assert pairs.size == VOCABULARY
    assert pairs.decode(np.concatenate([kept, held])) == text
    assert len(pairs.decode(held)) == pytest.approx(len(text) / 10, abs=1)
    assert max(kept.max(), held.max()) < VOCABULARY


def test_windows_are_shifted_by_one_and_cover_the_tokens() -> None:
    x, y = windows(np.arange(12), 5)
    assert x.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert y.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert windows(np.arange(11), 5)[0].shape == (2, 5)
    assert windows(np.arange(10), 5)[0].shape == (1, 5), "the last window lacks its last token"


def test_batches_repeat_with_their_seed() -> None:
    batches, _, _ = language(LENGTH)
    once, again, other = (list(islice(batches(4, seed), 3)) for seed in (0, 0, 1))
    for (x, y), (x_again, y_again) in zip(once, again, strict=True):
        assert x.shape == y.shape == (4, LENGTH)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(once[0][0], other[0][0])


def test_an_epoch_is_exactly_the_training_text() -> None:
    """Its windows, sorted, are the training tokens; none comes from the validation text."""
    batches, _, samples = language(LENGTH)
    x, y = next(batches(samples, 0))
    _, kept, _ = encode_corpus()
    border = samples * LENGTH
    assert len(kept) - border <= LENGTH
    expected = torch.from_numpy(kept[:border].reshape(samples, LENGTH))
    assert sorted(x.tolist()) == sorted(expected.tolist())
    assert sorted(y[:, -1].tolist()) == sorted(kept[LENGTH : border + 1 : LENGTH].tolist())


def test_the_perplexity_of_a_uniform_model_is_the_vocabulary() -> None:
    class Even(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return torch.zeros(*x.shape, VOCABULARY)

    _, validate, _ = language(LENGTH)
    model = Even()
    assert validate(model) == {"perplexity": pytest.approx(VOCABULARY)}
    assert model.training


def test_the_loss_is_a_mean_over_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, LENGTH, 9, generator=generator)
    y = torch.randint(9, (6, LENGTH), generator=generator)
    parts = [token_loss(logits[lo : lo + 2], y[lo : lo + 2]) for lo in (0, 2, 4)]
    assert token_loss(logits, y).item() == pytest.approx(torch.stack(parts).mean().item())


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_workloads_begin_with_equal_probabilities(name: str) -> None:
    workload = load_workload(name)
    x, y = next(workload.batches(2, 0))
    loss = workload.loss_fn(workload.model(x), y).item()
    assert loss == pytest.approx(math.log(VOCABULARY), rel=0.05)
    for block in workload.blocks:
        assert workload.model.get_submodule(block) is not None


def test_gpt_ties_its_weights_and_sees_no_future() -> None:
    model = load_workload("gpt").model
    assert isinstance(model, GPT)
    assert model.head.weight is model.embedding.tokens.weight
    x = torch.randint(VOCABULARY, (1, 128), generator=torch.Generator().manual_seed(0))
    later = x.clone()
    later[0, 100:] = 0
    with torch.no_grad():
        before, after = model(x), model(later)
    assert torch.allclose(before[:, :100], after[:, :100], atol=1e-5)
    assert not torch.allclose(before[:, 100:], after[:, 100:], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_a_small_model_learns(kind: str) -> None:
    torch.manual_seed(0)
    model = (
        GPT(length=LENGTH, width=32, heads=2, blocks=2) if kind == "gpt" else Recurrent(width=32)
    )
    batches, validate, samples = language(LENGTH)
    workload = Workload(model, token_loss, batches, validate=validate, train_samples=samples)
    eager = Eager(model, workload.loss_fn, optim.adamw(lr=3e-3))
    before = validate(model)["perplexity"]
    losses = [eager.step(x, y, (16, 16)) for x, y in islice(batches(32, 0), 40)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.7
    assert validate(model)["perplexity"] < before / 2
