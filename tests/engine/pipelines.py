"""Functions that open a pipeline on a started crew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from captures import shared
from plans import unpriced
from reference import leaf
from torch import nn

import hetpipe as hp
from hetpipe.capture.precision import Precision
from hetpipe.crew.crew import Crew

Pair = tuple[torch.Tensor, torch.Tensor]


def pipeline(
    crew: Crew,
    model: nn.Module,
    loss_fn: Any,
    example: Any,
    members: str | Sequence[str | Sequence[str]],
    schedule: str = "1f1b",
    microbatches: int = 1,
    *,
    shares: Sequence[tuple[float, ...]] | None = None,
    cuts: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    weights: str | None = None,
    precision: Precision = Precision(),  # noqa: B008 - frozen
    checkpoint: Path | None = None,
    **options: Any,
) -> hp.Pipeline:
    """Open a pipeline with a shared capture and an unpriced plan, or resume a checkpoint.

    `members` names one member per stage: "0101" means m0, m1, m0, m1. By default `pipedream` and
    `asp` stash weights and other schedules flush. `options` go to `hp.Pipeline`.
    """
    sync = options.get("sync_batch_norm", False)
    captured = shared(model, loss_fn, example, precision, sync)
    names = [f"m{n}" for n in members] if isinstance(members, str) else members
    plan, costs = unpriced(
        captured, names, schedule, len(leaf(example[0])), microbatches,
        shares=shares, cuts=cuts, in_flight=in_flight,
        weights=weights or ("stash" if schedule in ("pipedream", "asp") else "flush"),
    )  # fmt: skip
    options = {
        "cluster": crew.cluster, "crew": crew, "plan": plan, "costs": costs, "captured": captured,
        **options,
    }  # fmt: skip
    if checkpoint is not None:
        return hp.Pipeline.load(checkpoint, model, loss_fn, example, **options)
    return hp.Pipeline(model, loss_fn, example, **options)


def user_pipeline(
    crew: Crew, model: nn.Module, loss_fn: Any, example: Any, **options: Any
) -> hp.Pipeline:
    """Open a pipeline as a user does: it captures the model and chooses what the options omit."""
    options = {"optimizer": hp.optim.sgd(lr=0.1), **options}
    return hp.Pipeline(model, loss_fn, example, cluster=crew.cluster, crew=crew, **options)


def in_one_place(batches: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the same tensors for each mini-batch, with new values."""
    x, y = (tensor.clone() for tensor in batches[0])
    for new_x, new_y in batches:
        x.copy_(new_x)
        y.copy_(new_y)
        yield x, y


def members_by_stage(crew: Crew, counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Divide the crew's members, in order, into stages with these replica counts."""
    names = iter(crew.infos)
    return [tuple(next(names) for _ in range(count)) for count in counts]
