"""A device that is wrong is named, with layer and operator; one that is right is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from crews import Crews
from models import MLP, batches
from pipelines import pipeline
from torch import nn
from wrong_backends import WrongBackend

import hetpipe as hp
from hetpipe.sdk import registry

X, Y = batches(1)[0]


@pytest.fixture(autouse=True, scope="module")
def wrong() -> Iterator[None]:
    registry.register_backend(WrongBackend)
    yield


def opened(crews: Crews, kind: str, transport: str = "local", **options: Any) -> hp.Pipeline:
    """An MLP on numpy and, from its second layer on, on a faulty device."""
    torch.manual_seed(0)
    crew = crews(("numpy:cpu:0", f"wrong:{kind}:0"), transport)
    options = {"optimizer": hp.optim.adamw(lr=1e-2), **options}
    loss_fn = nn.functional.cross_entropy
    return pipeline(crew, MLP(), loss_fn, (X, Y), "01", microbatches=3, cuts=[1], **options)


FAULTS = {
    "tanh": ("operator", "forward", "layers.0", ("aten.tanh.default",)),
    "le": ("operator", "forward", "layers.2", ("aten.le.Scalar",)),
    "sqrt": ("operator", "update", "layers.2.weight", ("aten.sqrt.default",)),
    "nan": ("operator", "forward", "layers.4", ("aten.sigmoid.default",)),
    "raises": ("failed", "forward", "layers.4", ("aten.sigmoid.default",)),
    "unsteady": ("unsteady", "forward", "layers.4", ("aten.sigmoid.default",)),
    "stale": ("unsteady", "forward", "layers.4", ("aten.sigmoid.default",)),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_operator_is_named(crews: Crews, kind: str) -> None:
    verdict, program, layer, operators = FAULTS[kind]
    with opened(crews, kind) as pipe:
        found = pipe.diagnose(X, Y)
    print(found)
    culprit = found.culprit
    assert culprit is not None
    assert (found.verdict, culprit.program, culprit.operators) == (verdict, program, operators)
    assert culprit.layer == layer
    assert (culprit.stage, culprit.member, culprit.device) == (1, "m1", f"wrong:{kind}:0")
