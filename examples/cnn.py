"""Train a small CNN on handwritten digits over two devices, and measure its accuracy.

Both devices are torch on the processor. `hetpipe devices` lists the devices of your machine.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hetpipe as hp


def network() -> nn.Sequential:
    """Return a network from grey images (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    model, example = network(), (x[:128], y[:128])

    cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "pytorch:cpu:0"])
    with hp.Pipeline(
        model, nn.functional.cross_entropy, example,
        cluster=cluster, optimizer=hp.optim.adamw(lr=5e-3),
        cuts=[2], microbatches=4, schedule="1f1b",
    ) as pipe:  # fmt: skip
        print(pipe.plan)
        for epoch in range(4):
            order = torch.randperm(1408).split(128)  # the last 389 images are for validation
            losses = [result.loss for result in pipe.run((x[rows], y[rows]) for rows in order)]
            print("epoch", epoch, "mean loss", sum(losses) / len(losses))
        model.load_state_dict(pipe.state_dict())

    model.eval()
    accuracy = (model(x[1408:]).argmax(1) == y[1408:]).float().mean()
    print("accuracy", round(accuracy.item(), 3))


if __name__ == "__main__":
    main()
