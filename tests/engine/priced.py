"""Pipelines over a whole crew, planned by the planner with invented costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from captures import shared
from models import Transposed
from torch import nn

import hetpipe as hp
from hetpipe.cost.probe import Probe
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost, TiedBytes
from hetpipe.crew.crew import Crew
from hetpipe.plan.plan import Plan

PROBE = Probe(1e-3, 1e-3, 0.1, 64, 1 << 16)
Speeds = dict[str, float]
"""By member, the factor by which every pass seems slower than its predicted cost."""


class Mixed(nn.Module):
    """Batch norm, dropout and tied weights; the tied layers are neighbours, or first and last."""

    def __init__(self, far: bool) -> None:
        super().__init__()
        self.first = nn.Linear(20, 16)
        self.near = nn.Identity() if far else Transposed(self.first)
        width = 16 if far else 20
        self.norm1 = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.drop1 = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
        self.norm2 = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.last = Transposed(self.first) if far else nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.near(torch.tanh(self.first(x))))
        return self.last(self.norm2(self.drop1(x)))


def mixed(far: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Mixed(far)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(index))
    return x, torch.tanh(x)


def table_of(
    layers: Sequence[str],
    members: Sequence[str],
    samples: int,
    *,
    layer_s: float = 0.5,
    tied: tuple[int, ...] = (),
    probe: Probe | None = None,
) -> CostTable:
    """Return a table in which all layers take equal times on all members, so long that moving
    layers always pays."""
    cost = (LayerCost(layer_s, layer_s, layer_s / 50),) * len(layers)
    links = {(a, b): LinkCost(0.0, 1e12) for a in members for b in members if a != b}
    devices = {member: DeviceCost(cost, 0.0, 2**40, member, probe=probe) for member in members}
    nbytes = tuple(LayerBytes(name, 100, 0, 0, 8) for name in layers)
    shared_bytes = (TiedBytes("tied", 100, tied),) if tied else ()
    return CostTable("case", samples, nbytes, devices, links, 0.0, shared_bytes)


def open_planned(crew: Crew, model: nn.Module, **options: Any) -> hp.Pipeline:
    """Open a pipeline over all members of a crew, planned by the planner."""
    loss_fn, example = nn.functional.mse_loss, batch(0)
    options = {
        "optimizer": hp.optim.adamw(lr=1e-2), "microbatches": 3, "schedule": "1f1b",
        "captured": shared(model, loss_fn, example), **options,
    }  # fmt: skip
    return hp.Pipeline(model, loss_fn, example, cluster=crew.cluster, crew=crew, **options)


def count(plan: Plan, member: str) -> int:
    """Return the number of layers on a member."""
    return sum(stage.hi - stage.lo for stage in plan.stages if stage.devices == (member,))


def losses(pipe: hp.Pipeline, lo: int, hi: int) -> list[float]:
    """Train on the mini-batches lo to hi - 1 and return their losses."""
    results = list(pipe.run(batch(b) for b in range(lo, hi)))
    assert [result.index for result in results] == list(range(lo, hi))
    return [result.loss for result in results]
