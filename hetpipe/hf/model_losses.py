"""Losses of Hugging Face models, as `(sum, count)`: the loss that a model computes from labels.

Each function takes the model's output (a `ModelOutput`, a dict with `logits`, a tuple whose first
entry is the logits, or the logits) and the labels. Labels of -100 do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hetpipe.errors import HetpipeError
from hetpipe.losses import bce_with_logits, cross_entropy, mse


def causal_lm_loss(
    output: Any, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the loss of a causal language model as a sum and a count.

    `labels` has the shape of `input_ids`, [samples, tokens], and mostly equals it: the function
    compares each position's logits with the next label. Set padding to -100.
    """
    return _cross_entropy(logits_of(output)[:, :-1], labels[:, 1:], label_smoothing)


def masked_lm_loss(
    output: Any, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the loss of a masked language model as a sum and a count.

    `labels` has the shape of `input_ids`, [samples, tokens], and is -100 where no token is masked.
    """
    return _cross_entropy(logits_of(output), labels, label_smoothing)


def classification_loss(
    output: Any, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the loss of a model for sequence classification as a sum and a count.

    As in these models, logits with one column are a regression (mean squared error), whole numbers
    are classes (cross-entropy), and other labels, [samples, labels], are several labels for each
    sample (binary cross-entropy).
    """
    logits = logits_of(output)
    if logits.shape[-1] == 1:
        return mse()(logits.squeeze(-1), labels.view(-1))
    if labels.is_floating_point():
        return bce_with_logits()(logits, labels)
    return _cross_entropy(logits, labels.view(-1), label_smoothing)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output. Raises `HetpipeError` if it has none."""
    logits = output
    if isinstance(output, Mapping):  # a ModelOutput is a dict
        logits = output.get("logits")
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise HetpipeError(
            f"the model's output is a {type(output).__name__} without logits: use a model with a "
            "head, as AutoModelForCausalLM, or write a loss of your own"
        )
    return logits


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    if logits.shape[:-1] != labels.shape:
        raise HetpipeError(
            f"the logits have the shape {list(logits.shape)} and the labels {list(labels.shape)}: "
            f"give labels of the shape {list(logits.shape[:-1])}"
        )
    loss = cross_entropy(label_smoothing=smoothing)
    return loss(logits.flatten(0, -2), labels.flatten())
