"""The example device in C trains as torch does, alone, with other devices, and in processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_libraries import example
from plans import unpriced
from reference import train
from torch import nn
from torch.nn import functional

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Member
from hetpipe.zoo import digits, mlp

C, TORCH, NUMPY = "native:example.cpu:0", "pytorch:cpu:0", "numpy:cpu:0"
CLUSTER = """
transport = "shared-memory"

[backend.native]
libraries = ["libraries/mine.so"]

[[device]]
device = "native:example.cpu:1"

[[device]]
device = "numpy:cpu:0"
"""


def small_cnn() -> nn.Module:
    """Return a network with max and average pooling, a stride, and ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, stride=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def thin_digits() -> nn.Module:
    """Return a network of the zoo's digits blocks (batch norm, SiLU, shortcuts) with fewer
    channels.
    """
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(),
        digits.Block(4, 4), digits.Block(4, 8, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip


def points() -> nn.Module:
    return mlp.workload().model


def batches(model: Callable[[], nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (16, mlp.FEATURES) if model is points else (16, 1, 8, 8)
    x = torch.randn(shape, generator=generator)
    return [(x, torch.randint(10, (16,), generator=generator))] * 4


OPTIMIZERS = {
    "sgd": (
        hp.optim.sgd(lr=0.05, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ),
    "adam": (hp.optim.adam(lr=1e-2), lambda parameters: torch.optim.Adam(parameters, lr=1e-2)),
}


def losses(
    model: Callable[[], nn.Module], optimizer: str, cluster: hp.Cluster
) -> tuple[list[float], list[float]]:
    """Return the losses of a pipeline with a stage on each device, and the losses of torch."""
    data = batches(model)
    ours, eager_optimizer = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    module = model()
    expected = train(module, functional.cross_entropy, data, 2, eager_optimizer).losses
    captured = Captured(module, functional.cross_entropy, data[0])
    plan, costs = unpriced(captured, cluster.ids, "1f1b", 16, 2)
    with hp.Pipeline(
        module, functional.cross_entropy, data[0], cluster=cluster, optimizer=ours,
        captured=captured, plan=plan, costs=costs,
    ) as pipe:  # fmt: skip
        return [pipe.step(x, y) for x, y in data], expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer", "devices"),
    [
        (points, "sgd", [C]),
        (points, "adam", [TORCH, C]),
        (small_cnn, "adam", [C]),
        (small_cnn, "sgd", [C, TORCH]),
        (thin_digits, "sgd", [C]),
        (thin_digits, "adam", [NUMPY, C]),
    ],
)
def test_losses_equal_torch(
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[], nn.Module],
    optimizer: str,
    devices: list[str],
) -> None:
    monkeypatch.setenv("HETPIPE_NATIVE", str(example()))
    members = tuple(Member(device, device) for device in devices)
    cluster = hp.Cluster(members, transport="local")
    staged, expected = losses(model, optimizer, cluster)
    assert staged == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.01


@pytest.mark.slow
def test_a_library_of_the_cluster_file_trains_in_worker_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HETPIPE_NATIVE", raising=False)
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "mine.so").write_bytes(example().read_bytes())
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster = hp.Cluster.load(tmp_path / "cluster.toml")
    staged, expected = losses(points, "sgd", cluster)
    assert staged == pytest.approx(expected, rel=1e-4)
