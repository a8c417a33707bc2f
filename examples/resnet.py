import torch
from torch import nn

import hetpipe as hp


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs)
        second = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.short = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.short(x))


torch.manual_seed(0)
head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
model = nn.Sequential(Block(3, 16, 1), Block(16, 32, 2), Block(32, 32, 1), *head)
labels = torch.arange(160) % 4
images = torch.randn(160, 3, 16, 16) + labels.view(-1, 1, 1, 1) / 4  # brighter by class
how = {"shuffle": True, "num_workers": 2, "multiprocessing_context": "fork"}
loader = torch.utils.data.DataLoader(list(zip(images, labels, strict=True)), 32, **how)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
rule = hp.optim.from_torch(optimizer, scheduler)
options = {"optimizer": rule, "microbatches": 2, "cuts": [5], "precision": "bfloat16", "ema": 0.999}
cluster, loss_fn = hp.Cluster.local(devices=["pytorch:cpu:0"] * 2), nn.functional.cross_entropy
with hp.Pipeline(model, loss_fn, next(iter(loader)), cluster=cluster, **options) as pipe:
    for result in (result for _ in range(6) for result in pipe.run(loader)):
        print("update", result.update, result.loss)
    print("average", pipe.evaluate(loader, ema=True).loss)
    pipe.copy_to(model, ema=True)
