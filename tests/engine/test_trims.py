"""A worker returns unused memory of its device when it no longer needs it: another may need it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F
from captures import shared
from hetpipe.backends.numpy import NumpyDevice
from models import MLP, batches
from pipelines import pipeline

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.profile.measure import profile


@pytest.mark.slow
def test_after_a_profile_and_before_new_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    trims: list[str] = []
    monkeypatch.setattr(NumpyDevice, "trim", lambda self: trims.append(self.info.id))
    (x, y), *_ = batches(1)
    optimizer = hp.optim.sgd(lr=0.1)
    cluster = Cluster((Member("m0", "numpy:cpu:0"),), transport="local")
    with Crew.start(cluster) as crew:
        profile(shared(MLP(), F.cross_entropy, (x, y)), crew, optimizer, [4])
        profiled = len(trims)
        assert profiled >= 1
        with pipeline(crew, MLP(), F.cross_entropy, (x, y), "0", optimizer=optimizer) as pipe:
            pipe.step(x, y)
        assert len(trims) == profiled + 1
