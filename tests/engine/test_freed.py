"""A closed pipeline leaves no memory in use."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch.nn.functional as F
from models import MLP, batches

import hetpipe as hp
from hetpipe.cluster import Cluster, Member


@pytest.mark.slow
def test_a_closed_pipeline_is_freed() -> None:
    members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(2))
    x, y = batches(1)[0]
    with hp.Pipeline(
        MLP(), F.cross_entropy, (x, y), cluster=Cluster(members, transport="local"), cuts=[2],
        microbatches=2, schedule="pipedream", optimizer=hp.optim.adam(lr=0.05),
    ) as pipe:  # fmt: skip
        for _ in pipe.run([(x, y)] * 6):
            pass
        pipe.evaluate([(x, y)])
        parts = (pipe, pipe._captured, pipe._training, pipe._crew, pipe._crew._fleet)
        refs = {type(part).__name__: weakref.ref(part) for part in parts}
    del pipe, parts
    for _ in range(50):  # threads of the closed crew may take a moment to end
        gc.collect()
        left = [name for name, ref in refs.items() if ref() is not None]
        if not left:
            break
        time.sleep(0.1)
    assert left == []
