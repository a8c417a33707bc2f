"""hp.hf.Trainer trains as a loop of torch with the same mini-batches, optimizer and scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crews import UNLIKE
from torch import nn
from torch.utils.data import DataLoader

import hetpipe as hp
from hetpipe.callbacks import Callback
from hetpipe.crew.crew import Crew

transformers = pytest.importorskip("transformers")

DEVICES = UNLIKE
LENGTH, VOCABULARY, CLASSES, SAMPLES = 8, 32, 3, 11
FIXED: dict[str, Any] = {"cuts": [3], "microbatches": 2, "schedule": "1f1b"}
ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
    "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "seed": 5,
}  # fmt: skip


class Steps(Callback):
    """Records the result of every mini-batch."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def step(self, state: Any, result: Any) -> None:
        self.results.append(result)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts() -> list[dict[str, Any]]:
    """Return samples with padding, and a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH, (SAMPLES, 1), generator=generator)
    columns = {
        "input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100),
        "number": torch.arange(SAMPLES),
    }  # fmt: skip
    return [{name: column[n] for name, column in columns.items()} for n in range(SAMPLES)]


def classified() -> list[dict[str, Any]]:
    """Return samples whose class is that of their first token."""
    return [
        {**{n: v for n, v in text.items() if n != "labels"}, "label": int(text["input_ids"][0]) % 3}
        for text in texts()
    ]


def torch_losses(model: Any, data: Any, optimizer: Any, scheduler: Any, accumulate: int) -> Any:
    """Train as the Trainer does, and yield the loss of every mini-batch. In an update every label
    has the same weight, as in transformers' Trainer."""
    generator = torch.Generator().manual_seed(ARGS["seed"])
    loader = DataLoader(
        data, batch_size=4, shuffle=True, generator=generator,
        collate_fn=transformers.default_data_collator,
    )  # fmt: skip
    model.train()
    for _ in range(2):
        batches = [{n: v for n, v in batch.items() if n != "number"} for batch in loader]
        for lo in range(0, len(batches), accumulate):
            group = batches[lo : lo + accumulate]
            counts = [(batch["labels"][..., 1:] != -100).sum() for batch in group]
            optimizer.zero_grad()
            for batch, count in zip(group, counts, strict=True):
                loss = model(**batch).loss
                (loss * (count / sum(counts) if accumulate > 1 else 1)).backward()
                yield loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of transformers' Trainer: matrices of weights decay."""
    named = list(model.named_parameters())
    decays = [v for n, v in named if "bias" not in n and "LayerNorm" not in n and "ln_" not in n]
    others = [v for _, v in named if all(v is not each for each in decays)]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def test_a_language_model_trains_as_in_torch(crew: Crew, tmp_path: Path) -> None:
    """Padded texts, two mini-batches for each update (the last update of an epoch has one), a
    warm-up and clipping."""
    plain, model, steps = gpt2(), gpt2(), Steps()
    optimizer = torch.optim.AdamW(groups(plain), lr=1e-2)
    scheduler = transformers.get_scheduler("linear", optimizer, 2, 4)
    wanted = list(torch_losses(plain, texts(), optimizer, scheduler, 2))
    args = {**ARGS, "gradient_accumulation_steps": 2, "warmup_ratio": 0.3}
    trainer = hp.hf.Trainer(model, args, texts(), crew=crew, callbacks=[steps], **FIXED)
    history = trainer.train()
    assert [each.loss for each in steps.results] == pytest.approx(wanted, rel=1e-5)
    assert [each.update for each in steps.results] == [1, 1, 2, 3, 3, 4]
    assert [each.rates[0] for each in steps.results][::2] == pytest.approx([0, 1e-2 / 2, 1e-2])
    assert [row.epoch for row in history.epochs] == [1, 2]
    assert plain.lm_head.weight.detach().numpy() == pytest.approx(
        model.lm_head.weight.detach().numpy(), abs=1e-4
    )
    trainer.save_model(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def test_a_classifier_keeps_its_best_epoch_and_resumes(crew: Crew, tmp_path: Path) -> None:
    plain, model, steps = bert(), bert(), Steps()
    optimizer = torch.optim.SGD(groups(plain), lr=1e-2)
    scheduler = transformers.get_scheduler("cosine", optimizer, 0, 6)
    losses = list(torch_losses(plain, classified(), optimizer, scheduler, 1))
    plain.eval()
    args = {
        **ARGS, "optim": "sgd", "lr_scheduler_type": "cosine", "output_dir": str(tmp_path),
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "dataloader_num_workers": 1,
    }  # fmt: skip
    data = classified()
    options = {"crew": crew, "callbacks": [steps], "compute_metrics": accuracy, **FIXED}
    trainer = hp.hf.Trainer(model, args, data, data, **options)
    history = trainer.train()
    assert [each.loss for each in steps.results] == pytest.approx(losses, rel=1e-5)
    best = history.best("eval_loss")
    assert best is history.epochs[-1]
    batch = transformers.default_data_collator(data)
    del batch["number"]
    with torch.no_grad():
        output = plain(**batch)
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert found["eval_loss"] == pytest.approx(best.eval_loss, rel=1e-6)
    right = (output.logits.argmax(-1) == batch["labels"]).float().mean().item()
    assert found["eval_accuracy"] == best.metrics["eval_accuracy"] == pytest.approx(right)
    predictions, labels, metrics = trainer.predict(data)
    np.testing.assert_allclose(predictions, output.logits.numpy(), rtol=1e-4, atol=1e-5)
    assert labels.tolist() == batch["labels"].tolist()
    assert metrics == {"test_loss": found["eval_loss"], "test_accuracy": found["eval_accuracy"]}
    unlabelled = [{n: v for n, v in each.items() if n != "label"} for each in data]
    np.testing.assert_array_equal(trainer.predict(unlabelled).predictions, predictions)
    again = hp.hf.Trainer(bert(), args, data, data, **options)
    assert len(again.train(resume_from_checkpoint=True).epochs) == 2
    assert len(steps.results) == len(losses)  # nothing was left to train
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def trained_by_transformers(model: Any, args: Any) -> tuple[list[float], float]:
    """Train with transformers' Trainer in the order of hp.hf.Trainer; return the losses of the
    updates, and the loss of an evaluation."""
    data = [{n: v for n, v in each.items() if n != "number"} for each in classified()]
    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(
        data, batch_size=4, shuffle=True, generator=generator,
        collate_fn=transformers.default_data_collator,
    )  # fmt: skip

    class InThisOrder(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    trainer = InThisOrder(model, args, train_dataset=data, eval_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(("half", "unit"), [(None, 1e-5), ("bf16", 2**-8), ("fp16", 2**-11)])
def test_every_update_equals_the_trainer_of_transformers(
    crew: Crew, tmp_path: Path, half: str | None, unit: float
) -> None:
    """Losses agree within the rounding of one operation, and the changes of the weights within
    ten of it, relative to the largest change."""
    pytest.importorskip("accelerate")
    common = {
        **ARGS, "optim": "sgd", "learning_rate": 0.3, "output_dir": str(tmp_path), "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    options: dict[str, Any] = {"crew": crew, **FIXED}
    if half:
        common[half] = True
    if half == "bf16":  # numpy has no bfloat16
        options = {"cluster": hp.Cluster.local(devices=["pytorch:cpu:0"] * 2), **FIXED}
    if half == "fp16":
        options["loss_scale"] = 1024.0  # the first scale of a GradScaler overflows at once
    before, plain, model, steps = bert(), bert(), bert(), Steps()
    logs = transformers.TrainingArguments(**common, logging_steps=1)
    losses, wanted = trained_by_transformers(plain, logs)
    args = transformers.TrainingArguments(**common)
    trainer = hp.hf.Trainer(model, args, classified(), callbacks=[steps], **options)
    trainer.train()
    assert [each.loss for each in steps.results] == pytest.approx(losses, rel=unit)
    for start, one, two in zip(
        before.parameters(), plain.parameters(), model.parameters(), strict=True
    ):
        change = (one - start).abs().max().item()
        assert (two - one).abs().max().item() <= 10 * unit * change + 1e-6
    logits, _, metrics = trainer.predict(classified())
    assert metrics["test_loss"] == pytest.approx(wanted, rel=unit)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(half or "", torch.float32)
    rounded = torch.from_numpy(logits).to(dtype).float()
    assert torch.equal(rounded, torch.from_numpy(logits))


def test_faults_are_named_as_in_transformers(crew: Crew) -> None:
    unlabelled = [{n: v for n, v in each.items() if n != "label"} for each in classified()]
    trainer = hp.hf.Trainer(bert(), ARGS, unlabelled, crew=crew, **FIXED)
    with pytest.raises(hp.HetpipeError, match=r"train_dataset has input_ids, .*, and no 'labels'"):
        trainer.train()
    with pytest.raises(hp.HetpipeError, match=r"resume_from_checkpoint='out/last': give True or"):
        trainer.train(resume_from_checkpoint="out/last")  # type: ignore[arg-type]
    with pytest.raises(hp.HetpipeError, match=r"eval_dataset is a dict with first, second: give"):
        trainer.evaluate({"first": classified(), "second": classified()})  # type: ignore[arg-type]
    with pytest.raises(hp.HetpipeError, match=r"resume_from_checkpoint='auto' needs .* output_dir"):
        trainer.train(resume_from_checkpoint="auto")


def test_an_optimizer_wins_over_the_arguments(crew: Crew) -> None:
    model, steps = bert(), Steps()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    options: dict[str, Any] = {"optimizer": sgd, "callbacks": [steps], "crew": crew, **FIXED}
    trainer = hp.hf.Trainer(model, {**ARGS, "num_train_epochs": 1}, classified()[:4], **options)
    trainer.train()
    assert [each.rates for each in steps.results] == [(0.25,)]
    assert trainer.evaluate(classified()[:4])["eval_loss"] < steps.results[0].loss


def test_label_smoothing_equals_transformers() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, batch = gpt2().eval(), transformers.default_data_collator(texts())
    trainer = hp.hf.Trainer(model, {"label_smoothing_factor": 0.2}, texts())
    del batch["number"]
    output = model(**batch)
    total, count = trainer._loss(output, batch["labels"])
    wanted = LabelSmoother(0.2)(output, batch["labels"], shift_labels=True)
    torch.testing.assert_close(total / count, wanted)


def test_a_best_model_of_an_earlier_training_is_not_restored(
    crew: Crew, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {
        **ARGS, "optim": "sgd", "output_dir": str(tmp_path), "eval_strategy": "epoch",
        "save_strategy": "epoch", "load_best_model_at_end": True,
        "metric_for_best_model": "eval_odd",
    }  # fmt: skip
    data, kept = classified(), []
    for odd in (1.0, float("nan")):
        compute = lambda found, odd=odd: {"odd": odd}  # noqa: E731
        trainer = hp.hf.Trainer(
            bert(), args, data, data, crew=crew, compute_metrics=compute, **FIXED
        )
        trainer.train()
        kept.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert "eval_odd was a number in no epoch: the last weights stay" in caplog.text
    assert any(not torch.equal(value, kept[1][name]) for name, value in kept[0].items())
