"""Add a device to hetpipe: register a backend in a script, and train on it.

This backend derives from hetpipe's torch backend and replaces one operator. docs/backends.md shows
how to write a whole backend from the beginning.
"""

from typing import ClassVar

import torch
from hetpipe.backends.pytorch import PyTorchBackend
from torch import nn

import hetpipe as hp


def my_gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute GELU; call your own kernel here instead."""
    assert approximate == "none"
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


@hp.register_backend
class MyBackend(PyTorchBackend):
    name = "mine"
    operators: ClassVar = {"aten.gelu.default": my_gelu}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )
    batch = torch.randn(64, 32), torch.randint(4, (64,))
    cluster = hp.Cluster.local(devices=["mine:cpu:0", "numpy:cpu:0"])
    with hp.Pipeline(
        model, nn.functional.cross_entropy, batch,
        cluster=cluster, optimizer=hp.optim.sgd(lr=0.5),
        cuts=[1], microbatches=4, schedule="1f1b",
    ) as pipe:  # fmt: skip
        print(pipe.plan)
        for _ in range(10):
            print("loss", pipe.step(*batch))
        print(pipe.diagnose(*batch))  # compares every device with torch in float64


if __name__ == "__main__":  # needed, because workers load this file to find the backend
    main()
