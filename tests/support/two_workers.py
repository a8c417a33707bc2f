"""A training of two stages, each in its own worker, and the same training by torch alone."""

from __future__ import annotations

import torch
from models import CASES
from plans import unpriced
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member


def losses_of(devices: tuple[str, str], transport: str) -> tuple[list[float], list[float]]:
    """Return the losses of five mini-batches on two devices, and the losses of torch."""
    case = CASES["residual_cnn"]
    torch.manual_seed(1)
    model = case.model()
    generator = torch.Generator().manual_seed(2)
    batches = [case.batch(generator) for _ in range(5)]
    expected = train(model, case.loss_fn, batches, 4, lambda p: torch.optim.Adam(p, lr=1e-3)).losses
    captured = Captured(model, case.loss_fn, batches[0])
    plan, costs = unpriced(captured, ["one", "two"], "1f1b", case.mini_batch, 4)
    members = (Member("one", devices[0]), Member("two", devices[1]))
    with hp.Pipeline(
        model,
        case.loss_fn,
        batches[0],
        cluster=Cluster(members=members, transport=transport),
        optimizer=hp.optim.adam(lr=1e-3),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        return [float(pipe.step(x, y)) for x, y in batches], expected
