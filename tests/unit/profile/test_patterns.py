"""Layers that differ only in names form one pattern, and are compiled and run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.program import StageGraphs
from hetpipe.profile.patterns import Network
from hetpipe.profile.profiler import BACKWARD, FORWARD, UPDATE, Session, Times
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.registry import get_backend, open_device

SIZES = (2, 4)


class Scaled(nn.Module):
    """A product with a vector that the model holds as a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([self.factor, 1.0, 2.0])


def layers_of(*modules: nn.Module) -> list[StageGraphs]:
    """Return the layers of these modules in sequence, with 3 values in and out."""
    model = nn.Sequential(*modules)
    captured = Captured(model, F.mse_loss, (torch.randn(8, 3), torch.randn(8, 3)))
    count = len(captured.layer_graph(SIZES[0]).layers)
    table = get_backend("numpy").decompositions()
    return captured.stage_graphs(range(1, count), [table] * count, SIZES, hp.optim.adamw(1e-3))


def block() -> nn.Linear:
    return nn.Linear(3, 3)


@pytest.mark.slow
def test_layers_between_the_ends_are_one_pattern() -> None:
    """The first layer needs no gradient of its input, and the last one has the loss."""
    network = Network.of(layers_of(*(block() for _ in range(5))))
    assert network.layers == (0, 1, 1, 1, 2)
    assert [stage.stage for stage in network.patterns] == list(network.firsts) == [0, 1, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there", "alike"),
    [
        (nn.Identity(), nn.Tanh(), False),
        (nn.Dropout(0.5), nn.Dropout(0.5), True),
        (nn.Dropout(0.5), nn.Dropout(0.25), False),
        (Scaled(3.0), Scaled(3.0), True),
        (Scaled(3.0), Scaled(4.0), False),
        (nn.Softmax(1), nn.Softmax(0), False),
    ],
    ids=["operator", "dropout", "rate", "constant", "other constant", "argument"],
)
def test_everything_except_names_counts(here: nn.Module, there: nn.Module, alike: bool) -> None:
    """A module without parameters belongs to the layer before it."""
    network = Network.of(layers_of(block(), block(), here, block(), there, block()))
    assert len(network.layers) == 4
    assert (network.layers[1] == network.layers[2]) == alike


@pytest.mark.slow
def test_a_frozen_layer_is_another_pattern() -> None:
    frozen = block().requires_grad_(False)
    network = Network.of(layers_of(block(), block(), frozen, block(), block()))
    assert network.layers == (0, 1, 2, 1, 3)


class Counting:
    """A device that counts the programs it compiles."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.compiled = 0

    def compile_all(self, graphs: Sequence[Any]) -> Any:
        self.compiled += len(graphs)
        return self._device.compile_all(graphs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.mark.slow
def test_work_grows_with_patterns_and_not_with_layers() -> None:
    counts = []
    for layers in (3, 9):
        network = Network.of(layers_of(*(block() for _ in range(layers))))
        device = Counting(open_device("numpy:cpu:0"))
        session, taken = Session(device, network), Times()  # type: ignore[arg-type]
        for size in SIZES:
            session.walk(size, session.able, taken)
        session.update(taken)
        counts.append((device.compiled, session.compilations, taken.runs))
    assert counts[0] == counts[1] == (15, 15, 15)  # 2 sizes, 2 passes, 1 update; 3 patterns


@pytest.mark.slow
def test_a_walk_runs_the_active_patterns_forward_and_back() -> None:
    """Then walk again with fewer patterns: a layer whose neighbour is skipped gets a new input."""
    network = Network.of(layers_of(block(), block(), block(), block(), nn.Tanh(), block()))
    assert network.layers == (0, 1, 1, 2, 3)
    session, every, some = Session(open_device("numpy:cpu:0"), network), Times(), Times()
    session.walk(4, session.able, every)
    session.walk(4, frozenset({1, 3}), some)
    assert list(every.times_s) == [
        *((4, pattern, FORWARD) for pattern in (0, 1, 2, 3)),
        *((4, pattern, BACKWARD) for pattern in (3, 2, 1, 0)),
    ]
    assert list(some.times_s) == [
        (4, 1, FORWARD), (4, 3, FORWARD), (4, 3, BACKWARD), (4, 1, BACKWARD),
    ]  # fmt: skip
    session.update(some)
    assert sum(which == UPDATE for *_, which in some.times_s) == 4
