"""Train a BERT classifier. After Ctrl-C, start the script again: it continues."""

from importlib.util import find_spec

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

import hetpipe as hp


class Show(hp.callbacks.Callback):
    def step(self, state, result):
        print("update", result.update, result.loss, flush=True)


torch.manual_seed(0)
sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 8}
layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
config = BertConfig(**sizes, **layers, attention_probs_dropout_prob=0.0, num_labels=4)
model = BertForSequenceClassification(config).train()
ids, mask = torch.randint(4, 16, (240, 8)), torch.arange(8) < torch.randint(3, 9, (240, 1))
columns = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids[:, 0] % 4}
data = [{name: column[n] for name, column in columns.items()} for n in range(240)]
batches, tests = DataLoader(data[:200], 20, shuffle=True), DataLoader(data[200:], 20)
head = {"params": model.classifier.parameters(), "lr": 3e-3}
optimizer = torch.optim.AdamW([{"params": model.bert.parameters()}, head], lr=1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=120)

example, loss_fn = next(iter(tests)), hp.hf.classification_loss
options = {"optimizer": hp.optim.from_torch(optimizer, scheduler), "clip_norm": 1.0, "cuts": [5]}
options |= {"cluster": hp.Cluster.local(devices=["pytorch:cpu:0"] * 2), "microbatches": 2}
watch = {"monitor": "accuracy", "patience": 4, "folder": "run", "resume": "auto"}
watch["metrics"] = {"accuracy": lambda output, y: (output.logits.argmax(-1) == y).float().mean()}
watch["callbacks"] = [Show(), *[hp.callbacks.TensorBoard("log")] * bool(find_spec("tensorboard"))]
with hp.Pipeline(model, loss_fn, (example, example.pop("labels")), **options) as pipe:
    for row in pipe.fit(batches, 12, eval_data=tests, split="labels", **watch).rows():
        print("epoch", row["epoch"], row["eval_loss"], row["accuracy"])
    pipe.restore("run/best")
    pipe.copy_to(model)
