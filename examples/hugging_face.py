import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import hetpipe as hp

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
ends = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, use_cache=False)).train()


def loss_fn(output, labels):
    return cross_entropy(output.logits.flatten(0, 1), labels.flatten())


tokens = torch.randint(64, (8, 17))
batch = {"input_ids": tokens[:, :-1]}, tokens[:, 1:]
cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "pytorch:cpu:0"])
options = {"optimizer": hp.optim.adamw(lr=5e-3), "cuts": [4], "microbatches": 2, "schedule": "1f1b"}
with hp.Pipeline(model, loss_fn, batch, cluster=cluster, **options) as pipe:
    for result in pipe.run(batch for _ in range(10)):
        print("step", result.index, result.loss)
    model.load_state_dict(pipe.state_dict())
