"""Train with an optimizer and a scheduler of torch: two groups of parameters, and a warm-up."""

import torch
from torch import nn

import hetpipe as hp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
loss_fn = nn.functional.cross_entropy
x, y = torch.randn(64, 32), torch.randint(4, (64,))

weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
groups = [{"params": weights}, {"params": biases, "lr": 1e-3, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))

cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "numpy:cpu:0"])
options = {"optimizer": hp.optim.from_torch(optimizer, scheduler), "cuts": [2], "microbatches": 4}
with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, **options) as pipe:
    for result in pipe.run((x, y) for _ in range(10)):
        print("step", result.index, result.loss)

for index in range(10):  # the same training by torch alone, since the model still has its weights
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print("torch", index, loss.item())
