"""Train a network on the FPGA emulator with FPGA kernels; print its losses and torch's.

    PYTHONPATH=tests python tests/e2e/fpga_training.py mlp|cnn|digits|... [STEPS [MINI_BATCH]]

Names other than mlp and cnn are models of the zoo.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.cluster.member import BackendOptions
from hetpipe.zoo.load import load_workload

EMULATOR = "opencl:intel-fpga-emulator:0"
OPTIONS = BackendOptions({"families": {EMULATOR: "fpga"}}, Path())


def mlp() -> nn.Module:
    """Return three linear layers with a norm."""
    return nn.Sequential(
        nn.Linear(24, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 40), nn.GELU(),
        nn.Linear(40, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Return a network of two convolutions, one of them strided, with batch norms."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 3)), nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.SiLU(),
        nn.Conv2d(12, 20, 3, stride=2, padding=1), nn.BatchNorm2d(20), nn.SiLU(), nn.Flatten(),
        nn.Linear(80, 10),
    )  # fmt: skip


def task(name: str, mini_batch: int) -> tuple[nn.Module, Any, Any]:
    """Return the model, the loss and an iterator of mini-batches."""
    if name not in ("mlp", "cnn"):
        workload = load_workload(name)
        return workload.model, workload.loss_fn, workload.batches(mini_batch, 0)
    torch.manual_seed(2)
    x, y = torch.randn(mini_batch, 24), torch.randint(10, (mini_batch,))
    model = mlp() if name == "mlp" else cnn()
    return model, nn.functional.cross_entropy, iter(lambda: (x, y), None)


def main(name: str, steps: str = "6", mini_batch: str = "16") -> None:
    """Print {"losses": [...], "expected": [...]}."""
    model, loss_fn, stream = task(name, int(mini_batch))
    batches = list(islice(stream, int(steps)))
    expected = train(model, loss_fn, batches, 1, lambda p: torch.optim.SGD(p, 0.05, 0.9)).losses
    cluster = Cluster((Member("board", EMULATOR),), options={"opencl": OPTIONS})
    with hp.Pipeline(
        model, loss_fn, batches[0], cluster=cluster, optimizer=hp.optim.sgd(lr=0.05, momentum=0.9),
        cuts=[], microbatches=1, schedule="gpipe",
    ) as pipe:  # fmt: skip
        losses = []
        for x, y in batches:
            losses.append(pipe.step(x, y))
            print(losses[-1], file=sys.stderr, flush=True)
    print(json.dumps({"losses": losses, "expected": expected}))


if __name__ == "__main__":
    main(*sys.argv[1:])
