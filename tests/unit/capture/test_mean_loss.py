"""Capture refuses a loss that is neither a mean over samples nor a sum with a count.

Such a loss would train wrong with micro-batches; capture accepts all other losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetpipe.capture import Captured
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.index_bounds import IndexBound
from hetpipe.capture.export.mean_loss import LossCheck, LossWarning
from hetpipe.capture.export.outputs import Outputs
from hetpipe.errors import HetpipeError

WEIGHT = torch.tensor([0.1, 1.0, 5.0])
LABELS = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
CLASSES = IndexBound("y", 0, 3, -100, None, "cross_entropy has 3 classes", averaged=True)
FEATURES = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
Loss = Callable[[Any, Any], Any]


def linear() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(6, 3)


def fault(
    loss_fn: Loss,
    model: nn.Module | None = None,
    x: Any = FEATURES,
    y: Any = LABELS,
    samples: int = 4,
    classes: int = 3,
) -> str:
    model = model or linear()
    model_input = x if isinstance(x, dict) else {"input": x}
    outputs = Outputs.of(model(**model_input), Example(x, y).samples)
    labels = isinstance(y, Tensor) and y.dtype is torch.int64
    bounds = [replace(CLASSES, high=classes)] if labels else []
    check = LossCheck(model, loss_fn, Example(x, y), bounds, samples)
    state = torch.get_rng_state()
    text = check.fault(outputs)
    assert torch.equal(torch.get_rng_state(), state)
    return text


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
        lambda o, y: F.nll_loss(o.log_softmax(1), y),
        lambda o, y: F.nll_loss(o.softmax(1).log(), y),
        lambda o, y: F.binary_cross_entropy(o.sigmoid()[:, 0], y.float().clamp(max=1)),
        lambda o, y: F.mse_loss(o[:, 0], y.float()) + 1e-3 * WEIGHT.square().sum(),
        lambda o, y: (o.logsumexp(1) - o.gather(1, y[:, None])[:, 0]).sum() / len(y),
        lambda o, y: (F.cross_entropy(o, y, reduction="sum"), (y != -100).sum()),
        lambda o, y: (F.cross_entropy(o, y, reduction="sum"), len(y)),
        lambda o, y: (F.cross_entropy(o, y, WEIGHT, reduction="sum"), WEIGHT[y].sum()),
        lambda o, y: F.cross_entropy(F.dropout(o, 0.5), y),
        lambda o, y: F.mse_loss(o.squeeze(), F.one_hot(y, 3).float()),
    ],
    ids=range(12),
)
def test_means_and_counted_sums_pass(loss_fn: Loss) -> None:
    assert fault(loss_fn) == ""


def coupled(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o @ o.T, torch.arange(len(o)))


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda o, y: F.cross_entropy(o, y, WEIGHT), "no mean over samples"),
        (lambda o, y: F.cross_entropy(o, y, ignore_index=0), "no mean over samples"),
        (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "no mean over samples"),
        (coupled, "no mean over samples"),
        (lambda o, y: F.mse_loss(o[:, 0], y.float()).sqrt(), "no mean over samples"),
        (lambda o, y: o.std(0).sum(), "no mean over samples"),
        (lambda o, y: (F.cross_entropy(o, y), len(y)), r"loss_fn returns \(sum, count\)"),
        (lambda o, y: (F.cross_entropy(o, y, reduction="sum"), 1), "must add up"),
    ],
    ids=range(8),
)
def test_other_losses_are_refused_with_both_numbers(loss_fn: Loss, why: str) -> None:
    text = fault(loss_fn)
    model = linear()
    whole = loss_fn(model(FEATURES), LABELS)
    first = whole[0] if isinstance(whole, tuple) else whole
    assert f"{first.item():.6g}"[:6] in text
    assert "microbatches=1" in text
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(text)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 2, 1, 2, 2], [1] * 8, [2, 1, 2, 1, 2, 1, 0, 0]])
def test_a_wrong_loss_is_found_with_few_labels(samples: int, labels: list[int]) -> None:
    """Both halves of the first pair may have the same labels, and so may both halves of a drawn
    pair."""
    for loss_fn in (
        lambda o, y: F.cross_entropy(o, y, WEIGHT),
        lambda o, y: F.cross_entropy(o, y, ignore_index=0),
        lambda o, y: (F.cross_entropy(o, y, reduction="none") * y).sum() / (y.sum() + 1e-9),
    ):
        assert "no mean over samples" in fault(loss_fn, y=torch.tensor(labels), samples=samples)
        x, y = FEATURES[: 2 * samples], torch.tensor(labels[: 2 * samples])
        assert "no mean over samples" in fault(loss_fn, x=x, y=y, samples=samples)


@pytest.mark.parametrize("rare", [0, 99, 57])
def test_the_weight_of_a_rare_class_is_found(rare: int) -> None:
    """The check draws the first and last class at once, and other classes if a sample has them."""
    weight = torch.ones(100)
    weight[rare] = 0.1
    labels = torch.arange(10, 50).repeat(2)[: 16 * 4]
    if rare == 57:
        labels[37] = rare
    torch.manual_seed(0)
    text = fault(
        lambda o, y: F.cross_entropy(o, y, weight), nn.Linear(6, 100), torch.randn(64, 6), labels,
        samples=2, classes=100,
    )  # fmt: skip
    assert "no mean over samples" in text


def test_a_root_is_found_with_small_outputs() -> None:
    def root(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o.softmax(1), F.one_hot(y, 100).float()).sqrt()

    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(100, (32,))
    assert "no mean over samples" in fault(root, nn.Linear(6, 100), x, y, samples=8, classes=100)


def test_class_weights_are_found_with_labels_of_one_class() -> None:
    def weighted(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, WEIGHT)

    assert "their gradients differ" in fault(weighted, y=torch.ones_like(LABELS))


def test_a_choice_of_samples_by_comparison_is_found() -> None:
    def hard_samples(o: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(o, y, reduction="none")
        return (losses * (losses > losses.mean())).mean()

    assert "no mean over samples" in fault(hard_samples, nn.Linear(6, 3))
    assert "no mean over samples" in fault(hard_samples, nn.Linear(6, 3), y=LABELS.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_loss_is_also_tried_with_other_masks(dtype: torch.dtype) -> None:
    def masked(o: Tensor, y: dict[str, Tensor]) -> Tensor:
        return ((o - y["target"]).square() * y["mask"]).sum() / y["mask"].sum()

    def counted(o: Tensor, y: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return ((o - y["target"]).square() * y["mask"]).sum(), y["mask"].sum()

    y = {"target": torch.zeros(8, 3), "mask": torch.ones(8, 3, dtype=dtype)}
    assert "no mean over samples" in fault(masked, y=y)
    assert fault(counted, y=y) == ""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("is_called", [False, True], ids=["new", "called"])
def test_a_loss_may_read_an_attribute_of_the_model(mixes: bool, is_called: bool) -> None:
    """The loss may mix samples in training only, as mixture-of-experts routers do."""

    class Balanced(nn.Linear):
        auxiliary: Tensor

        def forward(self, input: Tensor) -> Tensor:
            shares = (9 * super().forward(input)).softmax(1)
            mean = shares.mean(0) if mixes and self.training else shares
            self.auxiliary = mean.square().mean()
            return shares

    model = Balanced(6, 3)
    if is_called:
        model(FEATURES)
    text = fault(lambda o, y: F.cross_entropy(o, y) + 9 * model.auxiliary, model)
    assert ("no mean over samples" in text) == mixes


def test_a_gradient_that_mixes_samples_is_found() -> None:
    def straight_through(o: Tensor, y: Tensor) -> Tensor:
        mixed = (o * o.detach().mean(0)).sum()
        return F.cross_entropy(o, y) + mixed - mixed.detach()

    assert "their gradients differ" in fault(straight_through)


class Probabilities(nn.Module):
    """A model whose outputs a loss may take the logarithm of; its batch norm mixes samples, and
    its dropout is random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Softmax(1)
        )

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        return {"p": self.layers(input)}


def test_batch_norm_and_dropout_do_not_disturb() -> None:
    model = Probabilities()

    def strict(o: dict[str, Tensor], y: Tensor) -> Tensor:
        assert o["p"].sum(1).allclose(torch.ones(()))  # random outputs fail this
        return F.nll_loss(o["p"].log(), y)

    def plain(o: dict[str, Tensor], y: Tensor) -> Tensor:
        return F.nll_loss(o["p"].log(), y)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for loss_fn in (strict, plain):
        check = LossCheck(model, loss_fn, Example(FEATURES, LABELS), [CLASSES], 4)
        assert check.fault(Outputs.of({"p": torch.empty(8, 3)}, 8)) == ""
    assert all(module.training for module in model.modules())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


class Returned(NamedTuple):
    loss: Tensor
    logits: Tensor


class ReturnsLoss(nn.Module):
    """A model that returns its loss, as models of transformers do, and calls dropout as a
    function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Returned:
        logits = self.out(F.dropout(self.table(ids), 0.5, self.training))
        return Returned(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def test_a_model_that_returns_its_loss_is_compared_with_its_parts() -> None:
    ids = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
    padded = ids.clone()
    padded[[0, 3], 2:] = -100
    assert fault(lambda o, _: o.loss, ReturnsLoss(), {"ids": ids, "labels": ids}, ()) == ""
    text = fault(lambda o, _: o.loss, ReturnsLoss(), {"ids": ids, "labels": padded}, ())
    assert "no mean over samples" in text


class TimeFirst(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input[..., None].repeat(1, 1, 3).transpose(0, 1)


def test_outputs_that_are_not_batch_first_pass() -> None:
    """With as many time steps as samples, random outputs have the wrong shape, and the true
    outputs decide."""

    def loss_fn(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), y.T.flatten())

    x, y = torch.randn(8, 8), torch.randint(3, (8, 8))
    assert fault(loss_fn, TimeFirst(), x, y) == ""


def test_a_loss_that_fails_for_several_micro_batches_warns() -> None:
    def loss_of_four(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.reshape(4, 3), y)

    with pytest.warns(LossWarning, match="fails for several micro-batches of 4 at once"):
        assert fault(loss_of_four) == ""


def test_the_verdict_is_kept_with_the_labels(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
    made: list[int] = []
    check = LossCheck.fault
    monkeypatch.setattr(
        LossCheck, "fault", lambda self, outputs: (made.append(1), check(self, outputs))[1]
    )
    faults = []
    for y in (LABELS, LABELS, LABELS.flip(0)):
        faults.append(Captured(linear(), coupled, (FEATURES, y), samples=4).loss_fault(4))
    assert len(made) == 2
    assert all("no mean over samples" in text for text in faults)


def test_ignored_labels_must_be_spread_evenly() -> None:
    """The example has no ignored labels, so its loss is a mean over samples; a later batch may
    have some."""
    captured = Captured(linear(), F.cross_entropy, (FEATURES, LABELS), samples=4)
    assert captured.loss_fault(4) == ""
    uneven = {"x": FEATURES.numpy(), "y": LABELS.where(LABELS != 0, -100).numpy()}  # 2 and 0
    with pytest.raises(
        HetpipeError, match=r"y has 0 labels -100 in samples 4 to 7 and 2 in samples 0 to 3"
    ):
        captured.check_means(uneven, [4, 4])
    captured.check_means(uneven, [8])
    captured.check_means({"x": FEATURES.numpy(), "y": LABELS.numpy()}, [4, 4])
