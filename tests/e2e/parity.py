"""A training run, and a crew that trains it in stages on any devices.

All rows of a test module share one crew, whose workers are threads, so rows share the compiled
programs. Intel's compiler takes 10 s for an attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from plans import unpriced
from reference import Parameters, leaf, train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.optim import Optimizer

MOST_STAGES = 3
TOLERANCE = 1e-4
GRADIENT_FLOOR = 1e-9  # absolute limit, for gradients whose true value is zero

DEVICES = {
    "pytorch": "pytorch:cpu:0",
    "numpy": "numpy:cpu:0",
    "pocl": "opencl:pocl:0",
    "intel-cpu": "opencl:intel-cpu:0",
    "intel-fpga-emulator": "opencl:intel-fpga-emulator:0",
}
"""Short names of devices in rows; `opencl` is the first that is no emulator or interpreter."""
RUNTIMES = ("pocl", "intel-cpu", "intel-fpga-emulator")
"""The OpenCL runtimes that compile their kernels."""


@dataclass(frozen=True, eq=False)
class Run:
    """A model, its batches, and one optimizer in hetpipe's and in torch's version.

    `model` always returns the same weights.
    """

    model: Callable[[], torch.nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    batches: Sequence[tuple[Any, Any]]
    microbatches: int
    optimizer: Optimizer
    eager_optimizer: Callable[[Parameters], torch.optim.Optimizer]

    @cached_property
    def captured(self) -> Captured:
        return Captured(self.model(), self.loss_fn, self.batches[0])

    @cached_property
    def expected(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Losses and the first step's gradients in plain torch.

        The losses must fall by a tenth; otherwise they would not show the updates.
        """
        trained = train(
            self.model(), self.loss_fn, self.batches, self.microbatches, self.eager_optimizer
        )
        losses = trained.losses
        assert losses[-1] < 0.9 * losses[0], losses
        return losses, trained.gradients


def start_crew(rows: Iterable[Sequence[str]]) -> Crew:
    """Start `MOST_STAGES` workers for each existing device that the rows name."""
    names = dict.fromkeys(name for row in rows for name in row)
    here = [(name, device) for name in names if (device := _find(name)) is not None]
    members = tuple(
        Member(f"{name}.{n}", device) for name, device in here for n in range(MOST_STAGES)
    )
    return Crew.start(Cluster(members=members, transport="local"))


def check_equal(crew: Crew, row: Sequence[str], run: Run) -> None:
    """Check that stages on the devices of `row` train `run` as plain torch does.

    Losses agree to 1e-4 relative, every gradient of the first step to 1e-4 of its norm.
    """
    members = [f"{name}.{row[:n].count(name)}" for n, name in enumerate(row)]
    for name, member in zip(row, members, strict=True):
        if member not in crew.cluster.ids:
            pytest.skip(f"no device {name!r}: install the extra `emulators` or pocl-opencl-icd")
    losses, gradients = run.expected
    example = run.batches[0]
    rows = leaf(example[0]).shape[0]
    plan, costs = unpriced(run.captured, members, "1f1b", rows, run.microbatches)
    with hp.Pipeline(
        run.model(),
        run.loss_fn,
        example,
        cluster=crew.cluster,
        crew=crew,
        optimizer=run.optimizer,
        captured=run.captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        _, found = pipe.gradients(*example)
        assert found.keys() == gradients.keys(), found.keys() ^ gradients.keys()
        for key, gradient in gradients.items():
            error = (found[key] - gradient).norm().item()
            assert error <= TOLERANCE * gradient.norm().item() + GRADIENT_FLOOR, (key, error)
        staged = [pipe.step(x, y) for x, y in run.batches]
    assert staged == pytest.approx(losses, rel=TOLERANCE), (staged, losses)


def find_opencl() -> str | None:
    """Return the first OpenCL device that is neither an emulator nor an interpreter."""
    devices, _ = hp.discover_devices(["opencl"])
    able = [d.id for d in devices if not (d.capabilities.emulated or d.capabilities.reference)]
    return able[0] if able else None


def _find(name: str) -> str | None:
    """Return the device's id, or None if there is no such device."""
    if name == "opencl":
        return find_opencl()
    found, _ = hp.discover_devices([DEVICES[name].partition(":")[0]])
    return DEVICES[name] if DEVICES[name] in {info.id for info in found} else None
