"""A backend that is registered at run time trains one of two stages: one from outside hetpipe, and
a simulated card, whose streams run work late."""

from __future__ import annotations

import pytest
from as_card import AsCard
from two_workers import losses_of
from wrapped_backend import WrappedBackend

import hetpipe as hp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", [WrappedBackend, AsCard])
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_registered_backend_trains_a_stage(transport: str, backend: type[hp.sdk.Backend]) -> None:
    hp.register_backend(backend)
    device = backend().discover()[0].id
    losses, expected = losses_of((device, "pytorch:cpu:0"), transport)
    assert losses == pytest.approx(expected, rel=1e-4)
    if transport == "local" and backend is WrappedBackend:
        assert WrappedBackend.opened > 0
