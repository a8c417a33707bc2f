"""Checks of small models: their programs, and their training alone or with another device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from hetpipe.check.difference import Array, case_tolerance, eps_of
from hetpipe.check.reference import reference_values
from hetpipe.conformance.check import Level, NotAsked, check, expect
from hetpipe.conformance.rig import Rig, compare, refusals
from hetpipe.sdk.graph import graph_outputs

ROWS, MICROBATCHES, STEPS = 12, 3, 6
LIMIT = 2e-4
"""Largest relative difference between a loss and torch's loss in float64."""


class _Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, 5))


class _Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(5, 7, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(28, 5),
        )  # fmt: skip


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.mixed = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * 12**-0.5).softmax(-1)
        x = x + self.out(nn.functional.gelu(weights @ v))
        result: torch.Tensor = self.head(x.mean(1))
        return result


@dataclass(frozen=True)
class Model:
    """A small model with its optimizer, and the shape of a sample.

    Samples are integers below `high`, or floats if `high` is 0.
    """

    name: str
    model: Callable[[], nn.Module]
    sample: tuple[int, ...]
    optimizer: tuple[str, dict[str, float]]
    high: int = 0

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (ROWS, *self.sample)
        x = (
            torch.randint(0, self.high, shape, generator=generator)
            if self.high
            else torch.randn(shape, generator=generator)
        )
        return x, torch.randint(0, 5, (ROWS,), generator=generator)

    def ours(self) -> Any:
        """Return hetpipe's optimizer with the model's settings."""
        import hetpipe.optim

        name, settings = self.optimizer
        return getattr(hetpipe.optim, name)(**settings)

    def losses(self) -> list[float]:
        """Return the losses of the model's training by torch in float64."""
        torch.manual_seed(0)
        model = self.model().double()
        name, settings = self.optimizer
        classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        optimizer: torch.optim.Optimizer = classes[name](model.parameters(), **settings)
        losses = []
        for step in range(STEPS):
            x, y = self.batch(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.double() if x.is_floating_point() else x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


MODELS = (
    Model("perceptron", _Perceptron, (10,), ("sgd", {"lr": 0.1, "momentum": 0.9})),
    Model("convolutions", _Convolutions, (2, 8, 8), ("adam", {"lr": 3e-3})),
    Model("transformer", _Transformer, (6,), ("adamw", {"lr": 3e-3}), 11),
)


def _programs(rig: Rig, model: Model, cuts: Sequence[int] = ()) -> list[tuple[str, Any]]:
    """Return (name, program) for each program of a model; `cuts` divide it into stages."""
    from hetpipe.capture.captured import capture

    torch.manual_seed(0)
    captured = capture(model.model(), nn.functional.cross_entropy, model.batch(0))
    count = len(cuts) + 1
    size = ROWS // MICROBATCHES
    stages = captured.stage_graphs(cuts, [rig.table] * count, [size], model.ours())
    return [
        (f"{name}, stage {stage.stage}", program)
        for stage in stages
        for name, program in stage.programs.items()
    ]


def _lacking(rig: Rig, model: Model) -> list[str]:
    reasons = (refusals(rig.device, program.graph) for _, program in _programs(rig, model))
    return list(dict.fromkeys(chain(*reasons)))


def _require(rig: Rig, model: Model) -> None:
    if lacking := _lacking(rig, model):
        raise NotAsked("refused: " + "; ".join(lacking))


def _program_check(model: Model, rig: Rig) -> None:
    _require(rig, model)
    for cuts in ((), (2,)):
        for name, program in _programs(rig, model, cuts):
            generator = np.random.default_rng(5)
            inputs = [_example(slot, generator) for slot in program.inputs]
            values = reference_values(program.graph, [torch.from_numpy(array) for array in inputs])
            expected = [values[node].numpy() for node in graph_outputs(program.graph)]
            executable = rig.device.compile(program.graph)
            outputs = rig.run(executable, [rig.put(array) for array in inputs])
            for slot, output, wide in zip(program.outputs, outputs, expected, strict=True):
                where = f"{slot.role} {slot.name} of the {name}"
                allowed = case_tolerance(wide, eps_of(output.dtype), 4096)
                compare(rig.get(output), wide, allowed, where)


def _example(slot: Any, generator: np.random.Generator) -> Array:
    """Return an input that every program accepts: integers 0 or 1, bools, positive floats."""
    if slot.dtype.startswith(("int", "uint")):
        return np.asarray(generator.integers(0, 2, slot.shape), slot.dtype)
    if slot.dtype == "bool":
        return np.asarray(generator.integers(0, 2, slot.shape), np.bool_)
    return np.asarray(np.abs(generator.standard_normal(slot.shape)) + 0.1, slot.dtype)


def _trained(model: Model, devices: Sequence[str], transport: str) -> list[float]:
    import hetpipe as hp
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cluster.member import Member

    torch.manual_seed(0)
    members = tuple(Member(f"{n}", device) for n, device in enumerate(devices))
    with hp.Pipeline(
        model.model(),
        nn.functional.cross_entropy,
        model.batch(0),
        cluster=Cluster(members, transport=transport),
        optimizer=model.ours(),
        cuts=[2] if len(devices) > 1 else [],
        microbatches=MICROBATCHES,
        schedule="1f1b",
    ) as pipe:
        return [pipe.step(*model.batch(step)) for step in range(STEPS)]


def _training_check(model: Model, beside: bool, transport: str, rig: Rig) -> None:
    _require(rig, model)
    if not beside:
        _same_losses(model, _trained(model, [rig.info.id], transport), "alone")
        return
    other = _reference(rig)
    for devices in ([rig.info.id, other], [other, rig.info.id]):
        _same_losses(model, _trained(model, devices, transport), " | ".join(devices))


def _same_losses(model: Model, losses: Sequence[float], where: str) -> None:
    for step, (loss, expected) in enumerate(zip(losses, model.losses(), strict=True)):
        expect(
            abs(loss - expected) <= LIMIT * abs(expected),
            f"{model.name}, {where}: the loss of step {step} is {loss:.7f}, torch in "
            f"float64 has {expected:.7f}",
        )


def _reference(rig: Rig) -> str:
    """Return the id of another device, of hetpipe's own backends, or raise `NotAsked`."""
    from hetpipe.sdk.host.registry import discover_devices, provider_of

    infos = [info for info in discover_devices()[0] if info.id != rig.info.id]
    ours = [info for info in infos if provider_of(info.backend).ours]
    references = [info for info in ours if info.capabilities.reference]
    if not ours:
        raise NotAsked("there is no other device")
    return (references or ours)[0].id


for _model in MODELS:
    check(
        f"programs/{_model.name}",
        "forward, backward, evaluation and update of a model compute what torch does in float64",
        "a wrong gradient of one operator, or operators that are right alone but wrong together",
        Level.TRAINING,
    )(partial(_program_check, _model))
for _model in MODELS:
    for _beside, _transport, _level in (
        (False, "local", Level.TRAINING),
        (True, "local", Level.TRAINING),
        (True, "shared-memory", Level.FULL),
    ):
        _where = ("a stage beside another device" if _beside else "alone") + (
            ", in processes" if _transport != "local" else ""
        )
        check(
            f"training/{_model.name}, {_where}",
            "a training has the same losses as torch",
            "state between passes: stale buffers, donation, events, queues",
            _level,
        )(partial(_training_check, _model, _beside, _transport))


@check(
    "training/something",
    "a device trains at least one of the three models",
    "missing operators: the report lists them at its end",
    Level.TRAINING,
)
def _(rig: Rig) -> None:
    lacking = {model.name: _lacking(rig, model) for model in MODELS}
    least = min(lacking, key=lambda name: len(lacking[name]))
    missing = "; ".join(lacking[least])
    expect(
        not missing,
        f"the device trains none of them; {least} lacks the fewest operators: {missing}",
    )
