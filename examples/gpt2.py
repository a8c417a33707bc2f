import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hetpipe as hp

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=1)).train()
lengths = torch.randint(6, 17, (64, 1))
mask = torch.arange(16) < lengths
tokens = (torch.randint(2, 64, (64, 1)) + torch.arange(16)) % 62 + 2  # they count upwards
inputs = {"input_ids": tokens * mask, "attention_mask": mask.long()}
batch = inputs, tokens.where(mask, -100)  # padding does not count

speeds = {"pytorch:cpu:0#1": 0.5}
cluster = hp.Cluster.local(devices=["pytorch:cpu:0", "pytorch:cpu:0"], emulate_speed=speeds)
options = {"optimizer": hp.optim.adamw(lr=1e-2), "microbatches": 4, "cuts": [5]}
with hp.Pipeline(model, hp.hf.causal_lm_loss, batch, cluster=cluster, **options) as pipe:
    for result in pipe.run(batch for _ in range(30)):
        print("step", result.index, result.loss)
    pipe.copy_to(model)
start = {"input_ids": torch.tensor([[10, 11, 12]]), "attention_mask": torch.ones(1, 3)}
print("continued", model.eval().generate(**start, max_new_tokens=5, pad_token_id=0).tolist()[0])
