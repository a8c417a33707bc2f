"""Entries of a model's state that no stage holds: unread buffers and modules' extra state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetpipe as hp
from hetpipe.pipeline.model_state import ExtraStateWarning


class Noted(nn.Linear):
    """A layer with a note that is not a tensor and a buffer that its forward does not read."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.note = {"seen": 3}
        self.register_buffer("unread", torch.arange(3))

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_the_whole_state_of_a_model_is_returned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Noted(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    cluster = hp.Cluster.local(devices=["numpy:cpu:0"])
    with hp.Pipeline(
        model, F.cross_entropy, (x, y), cluster=cluster, optimizer=hp.optim.sgd(lr=0.1),
        cuts=[], microbatches=1, schedule="1f1b",
    ) as pipe:  # fmt: skip
        pipe.step(x, y)
        state = pipe.state_dict()
        with pytest.warns(ExtraStateWarning, match=r"does not hold 0\._extra_state, from get_ex"):
            pipe.save(tmp_path / "saved")
    assert list(state) == list(model.state_dict())
    assert state["0._extra_state"] == {"seen": 3}
    assert torch.equal(state["0.unread"], torch.arange(3))
    other = nn.Sequential(Noted(4, 5), nn.ReLU(), nn.Linear(5, 3))
    other[0].note = {}
    other.load_state_dict(state)
    assert other[0].note == {"seen": 3}
    assert torch.equal(other[0].weight, state["0.weight"])
    assert not torch.equal(other[0].weight, model[0].weight)
