"""A backend that is registered at run time trains one of two stages: one from outside hetpipe, and
a simulated card, whose streams run work late."""

from __future__ import annotations

import pytest
import torch
from as_card import AsCard
from models import CASES
from plans import unpriced
from reference import train
from wrapped_backend import WrappedBackend

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", [WrappedBackend, AsCard])
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_registered_backend_trains_a_stage(transport: str, backend: type[hp.sdk.Backend]) -> None:
    hp.register_backend(backend)
    device = backend().discover()[0].id
    case = CASES["residual_cnn"]
    torch.manual_seed(1)
    model = case.model()
    generator = torch.Generator().manual_seed(2)
    batches = [case.batch(generator) for _ in range(5)]
    expected = train(model, case.loss_fn, batches, 4, lambda p: torch.optim.Adam(p, lr=1e-3)).losses

    captured = Captured(model, case.loss_fn, batches[0])
    plan, costs = unpriced(captured, ["theirs", "torch"], "1f1b", case.mini_batch, 4)
    members = (Member("theirs", device), Member("torch", "pytorch:cpu:0"))
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
        losses = [pipe.step(x, y) for x, y in batches]
    assert losses == pytest.approx(expected, rel=1e-4)
    if transport == "local" and backend is WrappedBackend:
        assert WrappedBackend.opened > 0
