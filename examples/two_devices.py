import torch
from torch import nn

import hetpipe as hp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
loss_fn = nn.functional.cross_entropy
x, y = torch.randn(64, 32), torch.randint(4, (64,))

cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "numpy:cpu:0"])
options = {"optimizer": hp.optim.adamw(lr=3e-3), "cuts": [2], "microbatches": 4}
with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, **options) as pipe:
    print(pipe.plan)
    for result in pipe.run((x, y) for _ in range(10)):
        print("step", result.index, result.loss)
    model.load_state_dict(pipe.state_dict())
print("torch alone", loss_fn(model(x), y).item())
