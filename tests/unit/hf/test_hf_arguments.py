"""The arguments of hp.hf.Trainer: meanings as in transformers, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hetpipe as hp
from hetpipe.hf.arguments import arguments_of
from hetpipe.hf.collected import Collected

transformers = pytest.importorskip("transformers")


def test_an_object_and_a_dict_are_read_alike() -> None:
    values = {"num_train_epochs": 2, "optim": "sgd", "max_steps": -1, "output_dir": "out"}
    assert arguments_of(SimpleNamespace(**values)) == arguments_of(values)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_steps": 100}, "max_steps=100: give num_train_epochs"),
        ({"fsdp": "full_shard"}, "fsdp='full_shard': name the devices with cluster="),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha=5: leave it at its default"),
        ({"report_to": "wandb"}, "report_to='wandb': give callbacks="),
        ({"eval_steps": 10}, "eval_steps=10: it evaluates after every epoch"),
        ({"learning_rat": 1}, "no 'learning_rat': did you mean learning_rate? leave it out"),
        ({"optim": "adafactor"}, "optim='adafactor'"),
        ({"eval_strategy": "steps"}, "eval_strategy='steps'"),
        ({"num_train_epochs": 1.5}, "num_train_epochs=1.5: give a whole number"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both True"),
        ({"load_best_model_at_end": True}, 'needs eval_strategy="epoch"'),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "give output_dir"),
        (3, "args is a int"),
    ],
)
def test_other_arguments_are_refused(given: Any, text: str) -> None:
    with pytest.raises(hp.HetpipeError) as caught:
        arguments_of(given)
    assert text in str(caught.value)


def test_the_arguments_of_transformers_are_read(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    own = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "eval_strategy": "epoch", "save_strategy": "epoch", "lr_scheduler_type": "cosine",
        "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "warmup_steps": 0.1,
        "report_to": "none", "do_train": True, "optim": "adamw_torch",
    }  # fmt: skip
    args = arguments_of(TrainingArguments(**own))
    assert (args.optim, args.lr_scheduler_type, args.eval_strategy) == (
        "adamw_torch", "cosine", "epoch",
    )  # fmt: skip
    assert (args.monitor, args.mode, args.warmup(25)) == ("eval_accuracy", "max", 3)
    assert args.folder == str(tmp_path)
    with pytest.raises(hp.HetpipeError, match="torch_compile=True: leave it"):
        arguments_of(TrainingArguments(**own, torch_compile=True))


def test_a_trainer_of_transformers_keeps_its_devices(tmp_path: Path) -> None:
    """A `TrainingArguments` resets the state of every Accelerator when it is made."""
    accelerate = pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    accelerator = accelerate.Accelerator(cpu=True)
    arguments_of(args)
    assert accelerator.state.distributed_type == accelerate.DistributedType.NO


def test_the_arguments_of_a_child_class_have_its_defaults(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    kind = transformers.Seq2SeqTrainingArguments
    assert arguments_of(kind(output_dir=str(tmp_path))) == arguments_of(
        transformers.TrainingArguments(output_dir=str(tmp_path))
    )
    with pytest.raises(hp.HetpipeError, match="carry out predict_with_generate=True"):
        arguments_of(kind(output_dir=str(tmp_path), predict_with_generate=True))


def test_bf16_on_a_processor(tmp_path: Path) -> None:
    """There transformers takes `bf16` only with `use_cpu`, and hetpipe asks for the devices."""
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True)
    model, loss = nn.Linear(2, 2), hp.losses.mse()
    with pytest.raises(hp.HetpipeError, match="use_cpu=True: name the devices with cluster="):
        hp.hf.Trainer(model, args, loss=loss)
    cluster = hp.Cluster.local(devices=["pytorch:cpu:0"])
    assert hp.hf.Trainer(model, args, loss=loss, cluster=cluster).args.bf16


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"processing_class": 1}, "no keyword 'processing_class': give data_collator="),
        ({"optimizers": (None, None)}, "no keyword 'optimizers': give optimizer=hp.optim.from_t"),
        ({"ema": 0.9}, "no keyword 'ema': use hp.Pipeline"),
        ({"microbatch": 2}, "no option 'microbatch'; did you mean microbatches?"),
    ],
)
def test_other_keywords_are_refused(given: Any, text: str) -> None:
    with pytest.raises(hp.HetpipeError) as caught:
        hp.hf.Trainer(nn.Linear(2, 2), {}, loss=hp.losses.mse(), **given)
    assert text in str(caught.value)


def test_a_metric_is_a_number() -> None:
    collected = Collected(lambda found: {"f1": [1, 2]}, "eval_")
    collected.update(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(hp.HetpipeError, match="metric 'f1' is a list: return one number"):
        collected.compute()


def test_only_models_of_transformers_are_saved(tmp_path: Path) -> None:
    trainer = hp.hf.Trainer(nn.Linear(2, 2), {}, loss=hp.losses.mse())
    with pytest.raises(hp.HetpipeError, match=r"a Linear has no save_pretrained.*torch\.save"):
        trainer.save_model(tmp_path)
    with pytest.raises(hp.HetpipeError, match="needs a folder"):
        trainer.save_model()
