"""The optimizer and the loss that a transformers.Trainer would use for a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hetpipe.errors import HetpipeError
from hetpipe.hf.arguments import Arguments
from hetpipe.hf.model_losses import causal_lm_loss, classification_loss, masked_lm_loss
from hetpipe.optim.rule import Optimizer
from hetpipe.optim.torch_optimizer import from_torch

LOSSES = {
    "ForCausalLM": causal_lm_loss,
    "LMHeadModel": causal_lm_loss,
    "ForMaskedLM": masked_lm_loss,
    "ForTokenClassification": masked_lm_loss,
    "ForSequenceClassification": classification_loss,
    "ForImageClassification": classification_loss,
}
"""Losses by the end of a model's class name."""

WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Patterns of parameters that transformers' Trainer does not decay."""


def loss_of(model: nn.Module, smoothing: float) -> Any:
    """Return the loss of a model's class. Raises `HetpipeError` if the class has no known loss."""
    name, config = type(model).__name__, getattr(model, "config", None)
    found = [loss for end, loss in LOSSES.items() if name.endswith(end)]
    if name.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False):
        found = [masked_lm_loss]  # the decoder's inputs are shifted, not the labels
    if not found:
        raise HetpipeError(
            f"{name} has no loss that hetpipe knows (it knows models named "
            f"{', '.join('...' + end for end in LOSSES)}): give loss=, a function of the output "
            "and the labels"
        )
    kind, columns = (getattr(config, key, None) for key in ("problem_type", "num_labels"))
    if found == [classification_loss] and kind == "regression" and columns != 1:
        raise HetpipeError(
            f"{name} is a regression with {columns} columns: give loss=, as hp.losses.mse() of the "
            "logits"
        )
    return partial(found[0], label_smoothing=smoothing) if smoothing else found[0]


def optimizer_of(model: nn.Module, args: Arguments, updates: int) -> Optimizer:
    """Return the optimizer with its scheduler. Biases and parameters of norms do not decay."""
    from transformers import get_scheduler
    from transformers.trainer_pt_utils import get_parameter_names

    names: Any = get_parameter_names
    decayed = set(names(model, [nn.LayerNorm], WITHOUT_DECAY))
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in trained if (name in decayed) is decays]}
        for decays in (True, False)
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = args.weight_decay, 0.0
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer
    if args.optim == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.learning_rate)
    else:
        betas = args.adam_beta1, args.adam_beta2
        optimizer = torch.optim.AdamW(groups, args.learning_rate, betas, args.adam_epsilon)
    try:
        scheduler = get_scheduler(
            args.lr_scheduler_type, optimizer, args.warmup(updates), updates,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise HetpipeError(f"lr_scheduler_type={args.lr_scheduler_type!r}: {error}") from error
    return from_torch(optimizer, scheduler)
