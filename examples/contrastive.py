"""Train two towers with a contrastive loss: all other samples of the mini-batch are negatives."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import hetpipe as hp


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Embedding(100, 32), nn.Flatten(), nn.Linear(8 * 32, 16))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: tuple[Tensor, Tensor], pairs: Tensor) -> Tensor:
        logits = self.scale.exp() * output[0] @ output[1].t()
        return (cross_entropy(logits, pairs) + cross_entropy(logits.t(), pairs)) / 2


torch.manual_seed(0)
model, loss_fn = Towers(), Contrast()
x, y = (torch.randn(32, 48), torch.randint(100, (32, 8))), torch.arange(32)
cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "numpy:cpu:0"])
options = {"cuts": [2], "microbatches": 4, "loss_over": "mini-batch"}
optimizer = hp.optim.adam(lr=3e-3)
with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, optimizer=optimizer, **options) as pipe:
    for result in pipe.run((x, y) for _ in range(10)):
        print("step", result.index, result.loss)
    loss_fn.load_state_dict(pipe.loss_state_dict())
print("temperature", loss_fn.scale.exp().item())
