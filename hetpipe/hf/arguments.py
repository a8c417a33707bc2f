"""Arguments: the settings of a `transformers.TrainingArguments` that hetpipe carries out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatch
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.pipeline.options import records_of
from hetpipe.words import choices, near

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Values of `optim`; torch's fused AdamW computes the same as AdamW."""

WITHOUT_EFFECT = {
    "do_train", "do_eval", "do_predict", "dataloader_pin_memory", "logging_dir", "run_name",
    "overwrite_output_dir", "save_safetensors",
}  # fmt: skip
"""Names that change nothing here, or that only describe a run."""

CURES = {
    "max_steps": "give num_train_epochs",
    "report_to": "give callbacks=[hp.callbacks.TensorBoard(folder)], or WandB, or MLflow",
    "logging_*": "give callbacks=[hp.callbacks.CSV(path)], or one of your own",
    "eval_*": 'it evaluates after every epoch: give eval_strategy="epoch"',
    "save_*": "it keeps the checkpoints last and best",
    "resume_from_checkpoint": "give it to train()",
    "gradient_checkpointing*": 'give the Trainer recompute="inputs"',
    "activation_checkpointing*": 'give the Trainer recompute="inputs"',
    "fsdp*": "name the devices with cluster=, and hetpipe divides the model",
    "ddp_*": "name the devices with cluster=, and hetpipe divides the model",
    "deepspeed": "name the devices with cluster=, and hetpipe divides the model",
    "parallelism_config": "name the devices with cluster=, and hetpipe divides the model",
    "hub_*": "call model.push_to_hub() after train()",
    "push_to_hub": "call model.push_to_hub() after train()",
}
"""Replacements of refused arguments, by a pattern of their names."""


KEYWORDS = {
    "optimizers": "give optimizer=hp.optim.from_torch(optimizer, scheduler)",
    "processing_class": "give data_collator=, which may pad with it, and save it yourself",
    "tokenizer": "give data_collator=, which may pad with it, and save it yourself",
    "compute_loss_func": "give loss=, a function of the output and the labels",
    "ema": "use hp.Pipeline and its fit(), as a Trainer keeps no average",
    "resume": "give resume_from_checkpoint= to train()",
    "checkpoint": "give the argument output_dir, and resume_from_checkpoint= to train()",
}
"""Replacements of refused keywords of a Trainer."""


@dataclass(frozen=True)
class Arguments:
    """The arguments that a training follows; names, meanings and defaults are transformers'."""

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    """The samples of a mini-batch, for all devices together."""
    per_device_eval_batch_size: int = 8
    num_train_epochs: float = 3.0
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch"
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0
    """The number of updates; below 1 the share of all updates, like `warmup_ratio`."""
    warmup_ratio: float | None = None
    max_grad_norm: float | None = 1.0
    label_smoothing_factor: float = 0.0
    bf16: bool = False
    fp16: bool = False
    seed: int = 42
    data_seed: int | None = None
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    remove_unused_columns: bool = True
    eval_strategy: str = "no"
    save_strategy: str = "steps"
    save_steps: float = 500
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    disable_tqdm: bool | None = None
    use_cpu: bool = False
    """Needed by a `TrainingArguments` with `bf16` without a card; here the cluster decides."""

    def __post_init__(self) -> None:
        one_of("optim", self.optim, OPTIMIZERS)
        one_of("eval_strategy", self.eval_strategy, ("no", "epoch"))
        one_of("save_strategy", self.save_strategy, ("no", "epoch", "steps"))
        if self.num_train_epochs != int(self.num_train_epochs) or self.num_train_epochs < 1:
            raise HetpipeError(
                f"num_train_epochs={self.num_train_epochs!r}: give a whole number of 1 or more"
            )
        if self.save_strategy == "steps" and self.save_steps != int(self.save_steps):
            raise HetpipeError(f"save_steps={self.save_steps!r}: give a number of updates")
        if self.bf16 and self.fp16:
            raise HetpipeError("bf16 and fp16 are both True: give one of them")
        if self.load_best_model_at_end:
            self._check_best()

    def _check_best(self) -> None:
        """Raise `HetpipeError` if no checkpoint could be the best."""
        if self.eval_strategy == "no":
            raise HetpipeError('load_best_model_at_end=True needs eval_strategy="epoch"')
        if self.folder is None:
            raise HetpipeError(
                "load_best_model_at_end=True needs a folder for checkpoints: give output_dir, and "
                'save_strategy="epoch"'
            )

    @property
    def folder(self) -> str | None:
        """The folder of the checkpoints, if there are any."""
        return None if self.save_strategy == "no" else self.output_dir

    @property
    def save_every(self) -> int | None:
        """The number of updates between two checkpoints, apart from those after each epoch."""
        steps = self.folder is not None and self.save_strategy == "steps"
        return int(self.save_steps) if steps else None

    @property
    def monitor(self) -> str:
        """The value of an evaluation that decides which epoch is best."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def mode(self) -> str:
        """Whether a lower value is better, `min`, or a higher one, `max`."""
        greater = self.greater_is_better
        if greater is None:
            greater = not self.monitor.endswith("loss")
        return "max" if greater else "min"

    def warmup(self, updates: int) -> int:
        """Return the number of updates of the warm-up."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(updates * (self.warmup_steps or self.warmup_ratio or 0.0))


def arguments_of(args: object) -> Arguments:
    """Return the arguments in a `TrainingArguments`, a dict, or an object with the same names.

    Raises `HetpipeError` for an argument that hetpipe does not carry out and that is not at its
    default.
    """
    given, defaults = _values(args), _defaults(args)
    known = [field.name for field in fields(Arguments)]
    for name, value in given.items():
        if name in known or name in WITHOUT_EFFECT:
            continue
        if name not in defaults:
            raise HetpipeError(
                f"TrainingArguments has no {name!r}: {near(name, [*known, *defaults])}leave it out"
            )
        if value != defaults[name]:
            raise HetpipeError(f"hetpipe does not carry out {name}={value!r}: {_cure(name)}")
    return Arguments(**{name: _plain(given[name]) for name in known if name in given})


def check_keywords(options: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raise `HetpipeError` for a keyword that is neither one of `own` nor a pipeline's option."""
    for name, cure in KEYWORDS.items():
        if name in options:
            raise HetpipeError(f"a Trainer has no keyword {name!r}: {cure}")
    records_of({name: value for name, value in options.items() if name not in own})


def one_of(name: str, value: str, values: tuple[str, ...]) -> None:
    """Raise `HetpipeError` unless a value is one of `values`."""
    if value not in values:
        raise HetpipeError(f"{name}={value!r}; {choices(str(value), values)}")


def _values(args: object) -> dict[str, Any]:
    """Return the arguments by name."""
    if isinstance(args, Mapping):
        return dict(args)
    if hasattr(args, "__dataclass_fields__"):
        return {name: getattr(args, name) for name in args.__dataclass_fields__}
    if not hasattr(args, "__dict__"):
        raise HetpipeError(
            f"args is a {type(args).__name__}: give transformers.TrainingArguments, or a dict with "
            "the same names"
        )
    return dict(vars(args))


def _defaults(args: object) -> dict[str, Any]:
    """Return the default of every argument. A `TrainingArguments` changes some when it is made.

    It also looks for devices, which would end the Accelerator of a transformers.Trainer: so it
    gets the devices of `args`.
    """
    from transformers import TrainingArguments

    if isinstance(args, TrainingArguments):
        found = {"_setup_devices": args.device, "_n_gpu": args.n_gpu}
        return _values(type("Defaults", (type(args),), found)(output_dir=args.output_dir))
    return {
        each.name: each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(TrainingArguments)
    }


def _plain(value: Any) -> Any:
    """Return the value of an enumeration as text, and any other value unchanged."""
    return getattr(value, "value", value)


def _cure(name: str) -> str:
    cures = (cure for pattern, cure in CURES.items() if fnmatch(name, pattern))
    return next(cures, "leave it at its default")
