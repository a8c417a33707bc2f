"""A loss over whole mini-batches together with other options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from plans import unpriced
from reference import check_close
from test_whole_loss import (
    LR,
    NARROW,
    ROWS,
    Contrast,
    Plain,
    Towers,
    classes,
    compare,
    opened,
    towers,
    weighted,
)
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.capture.whole_loss import WholeLossCaptured
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError, HetpipeError


class Clip(Towers):
    """Has the temperature in the model, as CLIP, and returns it once for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        return *super().forward(image, text), self.scale.exp().expand(len(image))


def clip_loss(out: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    image, text = (F.normalize(tower, dim=1) for tower in out[:2])
    logits = image @ text.t() * out[2].mean()
    return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


def test_a_temperature_in_the_model_trains_as_in_torch(crew: Crew) -> None:
    _, _, data = towers()
    torch.manual_seed(0)
    model = Clip().double()
    with opened(crew, model, clip_loss, data[0], cuts=[2]) as pipe:
        compare(pipe, Plain(model, clip_loss), data, 1e-10)
        assert pipe.state_dict()["scale"] != model.state_dict()["scale"]


def test_a_temperature_that_the_loss_takes_from_the_model_is_refused(crew: Crew) -> None:
    _, _, data = towers()
    model = Clip().double()
    scale = model.scale

    def loss(out: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        return clip_loss((*out[:2], scale.exp()), y)

    with pytest.raises(HetpipeError, match=r"a parameter \[\] that is not its own"):
        opened(crew, model, loss, data[0], cuts=[2])


class Direct(Clip):
    def forward(self, image: Tensor, text: Tensor) -> Any:
        return *super().forward(image, text)[:2], self.scale


def test_a_temperature_without_samples_is_refused(crew: Crew) -> None:
    _, _, data = towers()
    with pytest.raises(HetpipeError, match="whose first dimension is the samples"):
        opened(crew, Direct().double(), clip_loss, data[0], cuts=[2])


def test_a_loss_module_behind_a_function_is_refused(crew: Crew) -> None:
    """Otherwise its parameters would not be trained."""
    model, loss, data = towers()
    with pytest.raises(HetpipeError, match=r"a parameter \[\] that is not its own"):
        opened(crew, model, lambda out, y: loss(out, y), data[0], cuts=[2])


def test_replicas_accumulate_and_clip_as_torch(crew: Crew) -> None:
    """The last stage has two replicas and shares weights with the first; a mini-batch is short."""
    model, data = classes(tied=True, count=4)
    x, y = data[2]
    data[2] = x[:7], y[:7]
    captured = WholeLossCaptured(model, weighted, data[0])
    plan, costs = unpriced(captured, ["m0", ("m1", "m2")], "gpipe", ROWS, 2, cuts=[1])
    with hp.Pipeline(
        model, weighted, data[0], cluster=crew.cluster, crew=crew, captured=captured, plan=plan,
        costs=costs, optimizer=hp.optim.sgd(lr=LR), loss_over="mini-batch", accumulate=2,
        clip_norm=0.05,
    ) as pipe:  # fmt: skip
        plain = Plain(model, weighted, torch.optim.SGD)
        found = [pipe.step(*batch) for batch in data]
        expected = plain.step(*data[:2], clip=0.05) + plain.step(*data[2:], clip=0.05)
        assert found == pytest.approx(expected, rel=1e-10)
        check_close(pipe.state_dict(), plain.model.state_dict(), 1e-10, 1e-10)


@pytest.mark.parametrize("scale", [64.0, hp.LossScale(64.0)])
def test_loss_scales_change_nothing_in_bfloat16(crews: Crews, scale: Any) -> None:
    model, loss, data = towers(dtype=NARROW)
    crew, runs = crews(("pytorch:cpu:0",) * 2), []
    for given in (None, scale):
        options = {"precision": "bfloat16", "loss_scale": given, "clip_norm": 1.0}
        with opened(crew, model, loss, data[0], cuts=[2], **options) as pipe:
            losses = [result.loss for result in pipe.run(data)]
            runs.append((losses, pipe.state_dict(), pipe.loss_state_dict()))
    (losses, state, of_loss), (scaled, scaled_state, scaled_of_loss) = runs
    assert scaled == pytest.approx(losses, rel=1e-4)
    check_close(scaled_state, state, 1e-4, 1e-4)
    check_close(scaled_of_loss, of_loss, 1e-4, 1e-4)


class Overflowing(Contrast):
    """Has gradients that are not finite if `y` says so."""

    def forward(self, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        loss = super().forward(out, y % ROWS)
        return loss + (out[0].sum() * 0).abs().sqrt() if int(y[0]) == ROWS else loss


def test_an_adaptive_scale_skips_an_update(crew: Crew) -> None:
    model, _, data = towers(dtype=NARROW)
    loss = Overflowing()
    with opened(crew, model, loss, data[0], cuts=[2], loss_scale=hp.LossScale(64.0)) as pipe:
        pipe.step(*data[0])
        before, of_loss = pipe.state_dict(), pipe.loss_state_dict()
        x, y = data[1]
        pipe.step(x, y + ROWS)
        assert all(torch.equal(before[n], value) for n, value in pipe.state_dict().items())
        assert torch.equal(pipe.loss_state_dict()["scale"], of_loss["scale"])
        pipe.step(x, y)
        assert any(not torch.equal(before[n], value) for n, value in pipe.state_dict().items())


def shapeless(out: dict[str, Any], y: Tensor) -> Any:
    """Returns the losses of samples, or no tensor, if `y` says so."""
    if int(y.max()) < 8:
        return weighted(out, y)
    return out["scores"].sum(1) if int(y.max()) == 8 else 1.0


@pytest.mark.parametrize(
    ("label", "text"), [(8, r"returned shape \(10,\)"), (9, "returned <class 'float'>")]
)
def test_a_later_loss_of_a_wrong_shape_is_refused(crew: Crew, label: int, text: str) -> None:
    model, data = classes()
    x, y = data[0]
    with opened(crew, model, shapeless, data[0], cuts=[2]) as pipe:
        before = pipe.state_dict()
        with pytest.raises(CaptureError, match=text):
            pipe.step(x, torch.full_like(y, label))
        assert all(torch.equal(before[n], value) for n, value in pipe.state_dict().items())
        assert pipe.step(x, y) == pytest.approx(Plain(model, weighted).step((x, y))[0], rel=1e-10)
