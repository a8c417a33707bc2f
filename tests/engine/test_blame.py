"""The error for a device's exception always names device, operator and layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from models import MLP, batches
from pipelines import pipeline
from torch import nn
from wrong_backends import WrongBackend

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import WorkerError
from hetpipe.sdk.host import registry

X, Y = batches(1)[0]
ERRORS = {
    "raises": (
        r"'m1' \(wrong:raises:0\) failed at 1F0: wrong:raises:0: aten\.sigmoid\.default of layer "
        r"layers\.4 failed: ValueError: boom 42 \(.*wrong_backends\.py:\d+\)"
    ),
    "compiles": (
        r"failed at load: wrong:compiles:0 cannot compile aten\.sigmoid\.default of layer "
        r"layers\.4: ValueError: no code for this"
    ),
    "pairs": (
        r"failed at 1F0: wrong:pairs:0: a graph of layers layers\.2 to layers\.6 \(aten\.permute.*"
        r"\) failed, but no operator that was run alone failed: ValueError: not these two"
    ),
    "dies": (
        r"aten\.permute\.default of layer layers\.2 failed, and other operators fail now: the "
        r"device may be lost: RuntimeError: the context is gone"
    ),
    "uploads": r"m1.* wrong:uploads:0 fails in upload: KeyError: 'no room' \(.*wrong_backends",
    "downloads": r"'m1' .*wrong:downloads:0 fails in download: OSError: bus",
}


@pytest.fixture(autouse=True, scope="module")
def wrong() -> None:
    registry.register_backend(WrongBackend)


def train(kind: str, members: Sequence[str], transport: str) -> None:
    """Train one step of an MLP whose second stage is on a faulty device."""
    torch.manual_seed(0)
    devices = ("numpy:cpu:0", f"wrong:{kind}:0")
    cluster = Cluster(tuple(map(Member, ("m0", "m1"), devices)), transport=transport)
    with (
        Crew.start(cluster) as crew,
        pipeline(
            crew, MLP(), nn.functional.cross_entropy, (X, Y), members, microbatches=2, cuts=[1],
            optimizer=hp.optim.sgd(lr=0.1),
        ) as pipe,
    ):  # fmt: skip
        pipe.step(X, Y)


@pytest.mark.parametrize("kind", ERRORS)
def test_the_error_names_device_operator_and_layer(kind: str) -> None:
    with pytest.raises(WorkerError, match=ERRORS[kind]):
        train(kind, "01", "local")


@pytest.mark.parametrize("kind", ["raises", "downloads"])
def test_worker_processes_name_them_too(kind: str) -> None:
    with pytest.raises(WorkerError, match=ERRORS[kind]):
        train(kind, "01", "shared-memory")


def test_a_profile_names_them_too() -> None:
    torch.manual_seed(0)
    cluster = Cluster((Member("m0", "wrong:raises:0"),), transport="local")
    optimizer = hp.optim.sgd(lr=0.1)
    with pytest.raises(WorkerError, match=r"aten\.sigmoid\.default of layer layers\.4 failed"):
        hp.Pipeline(
            MLP(), nn.functional.cross_entropy, (X, Y), cluster=cluster, optimizer=optimizer
        )
