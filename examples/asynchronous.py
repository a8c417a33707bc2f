"""Train without flushes, as PipeDream does, and compare the accuracy with a training with flushes.

PipeDream keeps the weights of each forward until the backward of the same micro-batch (weight
stashing). Updates are some mini-batches late, but devices never wait for a flush.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hetpipe as hp

EPOCHS, TRAINED = 6, 1408  # the other 389 images are for validation


def accuracy(schedule: str) -> float:
    """Train a new network, and return the share of validation images that it classifies right."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 10)
    )
    batches = [
        (x[rows], y[rows]) for _ in range(EPOCHS) for rows in torch.randperm(TRAINED).split(64)
    ]
    cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "numpy:cpu:0"])
    options = {"schedule": schedule, "cuts": [1], "microbatches": 1}
    with hp.Pipeline(
        model, nn.functional.cross_entropy, batches[0],
        cluster=cluster, optimizer=hp.optim.adamw(lr=2e-3), **options,
    ) as pipe:  # fmt: skip
        for _ in pipe.run(batches):
            pass
        model.load_state_dict(pipe.state_dict())
    return (model(x[TRAINED:]).argmax(1) == y[TRAINED:]).float().mean().item()


if __name__ == "__main__":
    for schedule in ("1f1b", "pipedream"):  # by default, pipedream stashes weights
        print(schedule, "accuracy", round(accuracy(schedule), 3))
