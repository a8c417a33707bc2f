"""Layers divided between two stages train, clip, move and resume like whole layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from models import CASES
from reference import Parameters, gradients_of, train
from torch import nn

import hetpipe as hp
from hetpipe import checkpoint
from hetpipe.capture import Captured
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Split

DEVICES = ("pytorch:cpu:0",) * 2
POCL = "opencl:pocl:0"
SPLITS = {"mlp": {"layers.2": 10}, "residual_cnn": {"blocks.1.conv1": 5}}
"""For some of `CASES`: the layer to split, and the number of output channels in its first part."""
OPTIMIZERS: dict[str, tuple[hp.optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        hp.optim.sgd(lr=0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ),
    "adamw": (hp.optim.adamw(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
}
MICROBATCHES = {"1f1b": 4, "pipedream": 1}


def task(name: str, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    """Return a case's model, initialized from a seed, and 6 mini-batches."""
    torch.manual_seed(seed)
    model, generator = CASES[name].model(), torch.Generator().manual_seed(1)
    if name == "residual_cnn":
        # The true gradient of a bias in front of a batch norm is 0; Adam would amplify its rounding
        # errors.
        model.get_parameter("stem.bias").requires_grad_(False)
    return model, [CASES[name].batch(generator) for _ in range(6)]


def cut_inside(name: str) -> int:
    """Return the index of the layer's second part."""
    model, batches = task(name)
    names = Captured(model, CASES[name].loss_fn, batches[0], split=SPLITS[name]).layer_names
    ((layer, channels),) = SPLITS[name].items()
    return names.index(f"{layer}[{channels}:]")


def pipeline(
    crew: Crew, name: str, schedule: str = "1f1b", optimizer: str = "adamw", *, seed: int = 0,
    rule: hp.optim.Optimizer | None = None, folder: Path | None = None, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline that resumes from `folder` if one is given.

    By default it has two stages with the cut inside the split layer.
    """
    model, batches = task(name, seed)
    options = {
        "cluster": crew.cluster, "crew": crew, "optimizer": rule or OPTIMIZERS[optimizer][0],
        "schedule": schedule, "microbatches": MICROBATCHES[schedule], "split": SPLITS[name],
        **options,
    }  # fmt: skip
    if "cuts" not in options:
        options["cuts"] = [cut_inside(name)]
    if folder is not None:
        return hp.Pipeline.load(folder, model, CASES[name].loss_fn, batches[0], **options)
    return hp.Pipeline(model, CASES[name].loss_fn, batches[0], **options)


def close(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.wide
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", MICROBATCHES)
@pytest.mark.parametrize("second", [DEVICES[1], POCL])
def test_a_split_layer_equals_unpartitioned_training(
    crews: Crews, name: str, optimizer: str, schedule: str, second: str
) -> None:
    if second not in [info.id for info in hp.discover_devices()[0]]:
        pytest.skip(f"no {second}: apt install pocl-opencl-icd")
    model, batches = task(name)
    expected = train(
        model, CASES[name].loss_fn, batches, MICROBATCHES[schedule], OPTIMIZERS[optimizer][1]
    )
    with pipeline(crews((DEVICES[0], second)), name, schedule, optimizer) as pipe:
        losses = [pipe.step(x, y) for x, y in batches]
        state = pipe.state_dict()
        layers = [layer.partition("[")[0] for layer in pipe.plan.layers]
        first, rest = pipe.plan.stages
        assert layers[first.hi - 1] == layers[rest.lo] == next(iter(SPLITS[name]))
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    close(state, expected.state)


class ByHand(nn.Module):
    """A network of three linear layers, where the second is two modules and a concatenation."""

    def __init__(self, whole: nn.Sequential, channels: int) -> None:
        super().__init__()
        self.entry, self.last = copy.deepcopy(whole[0]), copy.deepcopy(whole[4])
        weight, bias = whole[2].weight.detach(), whole[2].bias.detach()
        self.first, self.rest = nn.Linear(8, channels), nn.Linear(8, len(bias) - channels)
        for part, rows in ((self.first, slice(channels)), (self.rest, slice(channels, None))):
            part.load_state_dict({"weight": weight[rows], "bias": bias[rows]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.entry(x))
        return self.last(torch.tanh(torch.cat([self.first(x), self.rest(x)], 1)))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "pipeoptim"])
def test_a_stream_gives_the_weights_of_a_network_split_by_hand(crew: Crew, weights: str) -> None:
    """Stages use versions of different ages, so plain training is no reference."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))
    by_hand = ByHand(whole, 4)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]
    states = []
    for model, split in ((whole, {"2": 4}), (by_hand, None)):
        with hp.Pipeline(
            model, F.cross_entropy, batches[0], cluster=crew.cluster, crew=crew, cuts=[2],
            optimizer=hp.optim.adamw(lr=1e-2), schedule="pipedream", weights=weights,
            microbatches=1, split=split,
        ) as pipe:  # fmt: skip
            losses = [outcome.loss for outcome in pipe.run(batches)]
            states.append((losses, pipe.state_dict()))
    (losses, state), (expected, wanted) = states
    assert losses == expected
    for kind in ("weight", "bias"):
        rows = torch.cat([wanted[f"first.{kind}"], wanted[f"rest.{kind}"]])
        assert torch.equal(state[f"2.{kind}"], rows)
        assert torch.equal(state[f"0.{kind}"], wanted[f"entry.{kind}"])
        assert torch.equal(state[f"4.{kind}"], wanted[f"last.{kind}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_resumes_with_a_split_or_without(
    crew: Crew, tmp_path: Path, name: str, before: bool
) -> None:
    """The checkpoint is the same: the model's names, and each optimizer state as one tensor."""
    whole: dict[str, Any] = {"split": None, "cuts": [2]}
    _, batches = task(name)
    with pipeline(crew, name, **({} if before else whole)) as pipe:
        for x, y in batches[:3]:
            pipe.step(x, y)
        pipe.save(tmp_path)
        expected = [pipe.step(x, y) for x, y in batches[3:]]
        wanted = pipe.state_dict()
    ((layer, _),) = SPLITS[name].items()
    saved = checkpoint.load(tmp_path).tensors
    shape = tuple(wanted[f"{layer}.weight"].shape)
    assert saved["param"][f"{layer}.weight"].shape == shape
    assert saved["state"][f"mean/{layer}.weight"].shape == shape
    assert not [each for named in saved.values() for each in named if "[" in each]
    with pipeline(crew, name, seed=5, folder=tmp_path, **(whole if before else {})) as pipe:
        assert len(pipe.plan.splits) == (not before)
        losses = [pipe.step(x, y) for x, y in batches[3:]]
        state = pipe.state_dict()
    assert losses == pytest.approx(expected, rel=1e-5)
    close(state, wanted)


def test_a_checkpoints_plan_has_the_split(crew: Crew, tmp_path: Path) -> None:
    _, batches = task("mlp")
    with pipeline(crew, "mlp") as pipe:
        pipe.step(*batches[0])
        pipe.save(tmp_path)
        expected = [pipe.step(x, y) for x, y in batches[1:]]
        plan = pipe.plan
    model, _ = task("mlp", seed=5)
    with hp.Pipeline.load(
        tmp_path, model, F.cross_entropy, batches[0], cluster=crew.cluster, crew=crew,
        optimizer=OPTIMIZERS["adamw"][0],
    ) as pipe:  # fmt: skip
        assert pipe.plan == plan
        assert pipe.plan.splits == (Split("layers.2", 10),)
        assert [pipe.step(x, y) for x, y in batches[1:]] == expected


@pytest.mark.slow
def test_gradients_evaluation_and_smaller_mini_batches(crew: Crew) -> None:
    """A new size reloads the stages with the current values."""
    model, batches = task("residual_cnn")
    loss_fn = CASES["residual_cnn"].loss_fn
    (x, y), *more = batches
    smaller = [(x[:rows], y[:rows]) for rows, (x, y) in zip((32, 7, 32), more, strict=False)]
    with pipeline(crew, "residual_cnn") as pipe:
        loss, gradients = pipe.gradients(x, y)
        losses = [pipe.step(*each) for each in smaller]
        evaluated = pipe.evaluate([(x, y)]).loss
        state = pipe.state_dict()
    expected_loss, expected_gradients = gradients_of(model, loss_fn, x, y, 4)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    close(gradients, expected_gradients)
    expected = train(model, loss_fn, smaller, 4, OPTIMIZERS["adamw"][1])
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    close(state, expected.state)
    model.load_state_dict(expected.state)
    model.eval()
    assert evaluated == pytest.approx(float(loss_fn(model(x), y).detach()), rel=1e-4)


def test_clipping_uses_the_norm_over_both_parts(crew: Crew) -> None:
    model, batches = task("mlp")
    norms: list[float] = []
    expected = train(
        model, F.cross_entropy, batches, 4, lambda p: torch.optim.SGD(p, 0.05, 0.9),
        before_step=lambda p: norms.append(float(torch.nn.utils.clip_grad_norm_(p, 0.1))),
    )  # fmt: skip
    assert norms[0] > 0.2
    with pipeline(crew, "mlp", optimizer="sgd", clip_norm=0.1) as pipe:
        losses = [pipe.step(x, y) for x, y in batches]
        state = pipe.state_dict()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    close(state, expected.state)


@pytest.mark.slow
def test_both_parts_have_the_parameters_weight_decay(crew: Crew) -> None:
    model, batches = task("mlp")

    def optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        weights = {"params": [p for p in parameters if p.ndim > 1]}
        biases = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}
        return torch.optim.AdamW([weights, biases], lr=1e-2, weight_decay=0.5)

    expected = train(model, F.cross_entropy, batches, 4, optimizer)
    rule = hp.optim.adamw(
        lr=1e-2, weight_decay=0.5, decay_exclude=lambda name: name.endswith("bias")
    )
    with pipeline(crew, "mlp", rule=rule) as pipe:
        losses = [pipe.step(x, y) for x, y in batches]
        state = pipe.state_dict()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    close(state, expected.state)


@pytest.mark.slow
def test_replicas_divide_the_rows_of_a_part(crews: Crews) -> None:
    model, batches = task("mlp")
    expected = train(model, F.cross_entropy, batches, 4, OPTIMIZERS["sgd"][1])
    with pipeline(crews(("numpy:cpu:0",) * 3), "mlp", optimizer="sgd", replicas=[2, 1]) as pipe:
        losses = [pipe.step(x, y) for x, y in batches]
        state = pipe.state_dict()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    close(state, expected.state)


@pytest.mark.slow
def test_layers_move_and_stay_split(crew: Crew) -> None:
    """The parts move to the same member and are separated again."""
    _, batches = task("mlp")
    with pipeline(crew, "mlp") as pipe:
        expected = [pipe.step(x, y) for x, y in batches]
        wanted = pipe.state_dict()
    with pipeline(crew, "mlp") as pipe:
        losses = []
        for cut, (x, y) in zip((2, 3, 2, 1, 4, 2), batches, strict=True):
            first, rest = pipe.plan.stages
            stages = (replace(first, hi=cut), replace(rest, lo=cut))
            pipe._training.move(replace(pipe.plan, stages=stages, splits=()))
            losses.append(pipe.step(x, y))
        assert pipe.plan.splits == (Split("layers.2", 10),)
        assert losses == expected
        close(pipe.state_dict(), wanted)


@pytest.mark.slow
def test_a_profile_has_two_layers_for_a_split_layer(crew: Crew) -> None:
    options: dict[str, Any] = {"cuts": None, "priced": True}
    with pipeline(crew, "mlp", **options) as pipe:
        assert pipe.costs is not None
        names = ("layers.0", "layers.2[:10]", "layers.2[10:]", "layers.4", "layers.6")
        assert tuple(layer.name for layer in pipe.costs.layers) == pipe.plan.layers == names
        assert pipe.costs.layers[1].params_nbytes == 10 * 33 * 4
        assert pipe.costs.layers[2].params_nbytes == 14 * 33 * 4
        assert pipe.plan.splits == (Split("layers.2", 10),)


def test_conflicting_options_are_refused(crew: Crew) -> None:
    with pytest.raises(
        HetpipeError, match=r"split: the update of lamb .* of layers\.2\.weight a separate"
    ):
        pipeline(crew, "mlp", rule=hp.optim.lamb())
    model, batches = task("mlp")
    captured = Captured(model, F.cross_entropy, batches[0], split={"layers.4": 3})
    with pytest.raises(HetpipeError, match=r"captured has split=\{'layers\.4': 3\}, not \{'lay"):
        pipeline(crew, "mlp", captured=captured)
    with pipeline(crew, "mlp") as pipe:
        plan = pipe.plan
    with pytest.raises(HetpipeError, match="the plan already contains split"):
        hp.Pipeline(
            model, F.cross_entropy, batches[0], cluster=crew.cluster, crew=crew, plan=plan,
            optimizer=OPTIMIZERS["sgd"][0], split={"layers.2": 10},
        )  # fmt: skip
    with pytest.raises(HetpipeError, match=r"not \{'layers\.2': 10\}: capture the model"):
        hp.Pipeline(
            model, F.cross_entropy, batches[0], cluster=crew.cluster, crew=crew, plan=plan,
            optimizer=OPTIMIZERS["sgd"][0], captured=captured,
        )  # fmt: skip
