"""Trainer: trains a Hugging Face model on a cluster, with the arguments of transformers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Generator
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader, Dataset

from hetpipe.callbacks.base import Callback, State
from hetpipe.callbacks.history import Epoch, History
from hetpipe.callbacks.monitors import BestCheckpoint
from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import HetpipeError
from hetpipe.hf.arguments import Arguments, arguments_of, check_keywords
from hetpipe.hf.collected import Collected, Compute
from hetpipe.hf.recipe import loss_of, optimizer_of
from hetpipe.loop.batches import Batches
from hetpipe.optim.rule import Optimizer
from hetpipe.pipeline.lossscale import LossScale
from hetpipe.pipeline.options import Options, UpdateOptions
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.words import words

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from hetpipe.crew.crew import Crew

LABELS = "labels"
log = logging.getLogger("hetpipe")


class Numbered(Protocol):
    """Samples by number, such as a list or a dataset of the package `datasets`."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


Samples = Dataset[Any] | Numbered
"""A dataset with a length."""


class TrainerOptions(Options, total=False):
    """The further keywords of a `Trainer`: callbacks of `fit`, and a pipeline's keywords."""

    cluster: Cluster
    crew: Crew
    optimizer: Optimizer | TorchOptimizer
    progress: bool | None
    callbacks: Sequence[Callback]


class Trainer:
    """Trains and evaluates a Hugging Face model on a cluster.

    `args` is a `transformers.TrainingArguments`, or a dict or an object with the same names. The
    arguments that hetpipe does not carry out must have their defaults. A mini-batch, of all devices
    together, has `per_device_train_batch_size` samples; without the option `buckets`,
    `data_collator` must pad each to the same length. `compute_metrics` as in transformers. `loss`
    is a function of the model's output and the labels; by default it is the loss of the model's
    class. `options` are a `cluster` (by default all devices of this machine), `callbacks` and the
    options of `Pipeline`, which win over `args`.

    Every call starts a pipeline with the weights in `model`, and closes it at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        args: object,
        train_dataset: Samples | None = None,
        eval_dataset: Samples | None = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        compute_metrics: Compute | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.model, self.args = model, arguments_of(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._loss = loss or loss_of(model, self.args.label_smoothing_factor)
        if loss is not None and self.args.label_smoothing_factor:
            raise HetpipeError("label_smoothing_factor has no effect on loss=: smooth it yourself")
        check_keywords(options, TrainerOptions.__annotations__.keys() - Options.__annotations__)
        if self.args.eval_strategy != "no" and eval_dataset is None:
            raise HetpipeError(f"eval_strategy={self.args.eval_strategy!r} needs eval_dataset")
        self._collator, self._compute = data_collator, compute_metrics
        self._options: dict[str, Any] = dict(options)
        self._callbacks = tuple(self._options.pop("callbacks", ()))
        if self.args.use_cpu and self._cluster() is not None:
            raise HetpipeError("use_cpu=True: name the devices with cluster=, which decides here")

    def train(self, resume_from_checkpoint: bool | Literal["auto"] | None = None) -> History:
        """Train in train mode, copy the weights into the model, and return the history.

        With `resume_from_checkpoint` continues from `output_dir`; "auto": if there is a checkpoint.
        """
        args, evaluates = self.args, self.args.eval_strategy != "no"
        if resume_from_checkpoint not in (True, False, None, "auto"):
            raise HetpipeError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: give True or 'auto'; a "
                "training continues from output_dir"
            )
        if resume_from_checkpoint and args.folder is None:
            raise HetpipeError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} needs a folder of checkpoints: "
                'give output_dir, and a save_strategy that is not "no"'
            )
        loader = self._loader(self.train_dataset, "train_dataset", trains=True)
        per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
        optimizer = self._options.get("optimizer") or optimizer_of(
            self.model, args, int(args.num_train_epochs) * per_epoch
        )
        best = BestModel(Path(args.folder or ""), args) if args.load_best_model_at_end else None
        self.model.train()
        example = self._example(self.train_dataset, "train_dataset", trains=True)
        options = {**self._training_options(), **self._options, "optimizer": optimizer}
        with Pipeline(self.model, self._loss, example, **options) as pipe:
            history = pipe.fit(
                loader,
                int(args.num_train_epochs),
                eval_data=self._loader(self.eval_dataset, "eval_dataset") if evaluates else None,
                metrics=self._metrics("eval_") if evaluates else None,
                callbacks=(*([best] if best else ()), *self._callbacks),
                split=LABELS,
                folder=args.folder,
                save_every=args.save_every,
                resume=resume_from_checkpoint or False,
                progress=False if args.disable_tqdm else None,
            )
            if best and history.best(best.monitor, best.mode):
                pipe.restore(best.folder)
            elif best:
                log.warning("%s was a number in no epoch: the last weights stay", best.monitor)
            pipe.copy_to(self.model)
        return history

    def evaluate(self, eval_dataset: Samples | None = None) -> dict[str, float]:
        """Return `eval_loss` and the metrics, whose names begin with `eval_`."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._evaluate(data, "eval_dataset", "eval_", self._metrics("eval_"))

    def predict(self, dataset: Samples) -> Any:
        """Return a `PredictionOutput` of transformers: the logits and the labels of all samples as
        numpy arrays, and metrics, whose names begin with `test_`. Labels may be missing."""
        from transformers.trainer_utils import PredictionOutput

        example = self._example(dataset, "dataset", labelled=False)
        collected = Collected(self._compute, "test_")
        if example[1] is not None:
            metrics = {"collected": collected}
            values = self._evaluate(dataset, "dataset", "test_", metrics)
            return PredictionOutput(collected.logits, collected.labels, values)
        loader = self._loader(dataset, "dataset")
        with Pipeline(self.model, None, example, **self._forward_options()) as pipe:
            for output in pipe.predict_batches(loader):
                collected.update(output, None)
        return PredictionOutput(collected.logits, None, {})

    def save_model(self, folder: str | Path | None = None) -> None:
        """Write the model for `from_pretrained`, by default to `output_dir`. Raises `HetpipeError`
        without a folder, and for a model that is not of transformers."""
        target = folder or self.args.output_dir
        if target is None:
            raise HetpipeError("save_model() needs a folder: give one, or output_dir in args")
        write = getattr(self.model, "save_pretrained", None)
        if write is None:
            kind = type(self.model).__name__
            raise HetpipeError(
                f"a {kind} has no save_pretrained, so it is no model of transformers: write "
                "model.state_dict() with torch.save"
            )
        write(target)

    def _evaluate(
        self, data: Any, name: str, prefix: str, metrics: dict[str, Collected]
    ) -> dict[str, float]:
        loader, options = self._loader(data, name), self._forward_options()
        pairs = Batches(loader, LABELS, name, 1).pair
        example = self._example(data, name)
        with Pipeline(self.model, self._loss, example, **options) as pipe:
            found = pipe.evaluate(map(pairs, loader), metrics)
        return {f"{prefix}loss": found.loss, **found.metrics}

    def _metrics(self, prefix: str) -> dict[str, Collected]:
        return {"collected": Collected(self._compute, prefix)} if self._compute else {}

    def _training_options(self) -> dict[str, Any]:
        """Return the options of a pipeline that come from the arguments."""
        args = self.args
        return {
            "cluster": self._cluster(),
            "accumulate": args.gradient_accumulation_steps,
            "clip_norm": args.max_grad_norm or None,
            "precision": self._precision(),
            "loss_scale": LossScale() if args.fp16 else None,
            "seed": args.seed,
        }

    def _forward_options(self) -> dict[str, Any]:
        """Return the options of a pipeline that only evaluates."""
        training = {"optimizer", "rebalance", *(field.name for field in fields(UpdateOptions))}
        given = {name: value for name, value in self._options.items() if name not in training}
        return {"cluster": self._cluster(), "precision": self._precision()} | given

    def _cluster(self) -> Cluster | None:
        if {"cluster", "crew"} & set(self._options):
            return None
        return Cluster.local()

    def _precision(self) -> str | None:
        return "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else None

    def _loader(self, dataset: Any, name: str, trains: bool = False) -> DataLoader[Any]:
        """Return the mini-batches of a dataset, shuffled for a training."""
        args = self.args
        check_samples(dataset, name)
        seed = args.seed if args.data_seed is None else args.data_seed
        return DataLoader(
            dataset,
            batch_size=self._size(trains),
            shuffle=trains,
            generator=Generator().manual_seed(seed) if trains else None,
            num_workers=args.dataloader_num_workers,
            collate_fn=self._collate,
            drop_last=args.dataloader_drop_last,
        )

    def _size(self, trains: bool) -> int:
        args = self.args
        return args.per_device_train_batch_size if trains else args.per_device_eval_batch_size

    def _example(
        self, dataset: Any, name: str, trains: bool = False, labelled: bool = True
    ) -> tuple[Any, Any]:
        """Return the first samples of a dataset as an example."""
        check_samples(dataset, name)
        batch = self._collate([dataset[n] for n in range(min(self._size(trains), len(dataset)))])
        if LABELS not in batch:
            if not labelled:
                return batch, None
            raise HetpipeError(
                f"a batch of {name} has {words(batch)}, and no {LABELS!r}: give the dataset a "
                "column labels or label, or a data_collator that makes labels"
            )
        return Batches([batch], LABELS, name, 1).pair(batch)

    def _collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return a mini-batch of samples, without the columns that the model does not take."""
        from transformers import default_data_collator

        if self.args.remove_unused_columns:
            used = {*inspect.signature(self.model.forward).parameters, "label", "label_ids", LABELS}
            samples = [
                {name: value for name, value in sample.items() if name in used}
                if isinstance(sample, Mapping)
                else sample
                for sample in samples
            ]
        return dict((self._collator or default_data_collator)(samples))


def check_samples(dataset: Any, name: str) -> None:
    """Raise `HetpipeError` unless a dataset has samples by number."""
    if dataset is None:
        raise HetpipeError(f"there is no {name}: give one")
    if isinstance(dataset, Mapping):
        raise HetpipeError(
            f"{name} is a dict with {words(map(str, dataset))}: give one dataset, and others to "
            "evaluate()"
        )
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise HetpipeError(f"{name} needs a length of 1 sample or more, for schedules")


class BestModel(BestCheckpoint):
    """Saves the best epoch. The metrics' names are known only after the first evaluation."""

    def __init__(self, folder: Path, args: Arguments) -> None:
        super().__init__(folder / "best", args.monitor, args.mode)

    def begin(self, state: State) -> None:
        """Check nothing yet."""

    def epoch(self, state: State, row: Epoch) -> None:
        """Save if this epoch is the best. Raises `HetpipeError` if it lacks the value."""
        if self.monitor not in row.values:
            raise HetpipeError(
                f"metric_for_best_model={self.monitor!r}: an epoch has {', '.join(row.values)}"
            )
        super().epoch(state, row)
