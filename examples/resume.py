"""Save a checkpoint, and continue with another cut: the losses are the same up to rounding."""

import tempfile

import torch
from torch import nn

import hetpipe as hp


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def main() -> None:
    torch.manual_seed(1)
    loss_fn, batch = nn.functional.cross_entropy, (torch.randn(64, 32), torch.randint(4, (64,)))
    options = {
        "cluster": hp.Cluster.local(devices=["pytorch:cpu:0", "numpy:cpu:0"]),
        "optimizer": hp.optim.adamw(lr=3e-3),
        "microbatches": 4,
        "schedule": "1f1b",
    }
    with tempfile.TemporaryDirectory() as folder:
        with hp.Pipeline(network(), loss_fn, batch, cuts=[2], **options) as pipe:
            for _ in range(5):
                pipe.step(*batch)
            pipe.save(folder)
            print("same cut   ", [pipe.step(*batch) for _ in range(5)])
        with hp.Pipeline.load(folder, network(), loss_fn, batch, cuts=[1], **options) as pipe:
            print("another cut", [pipe.step(*batch) for _ in range(5)])


if __name__ == "__main__":
    main()
