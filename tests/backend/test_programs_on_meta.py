"""The programs of the zoo call a card's kernels with tensors of that card, and no other.

On the meta device a program has shapes and no values. So a tensor that the program makes on another
device, and a value that the host would read, are errors.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.operatorcounts import DONATED, programs
from hetpipe.backends.pytorch.guards import guarded
from hetpipe.backends.pytorch.program import Program

from hetpipe.sdk.graph import dtype_name
from hetpipe.zoo.load import zoo_names

MODELS = zoo_names(published=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_result_is_on_the_card(model: str) -> None:
    for kind, captured in programs(model).items():
        graph, _ = guarded(captured.graph)
        donate = {i for i, slot in enumerate(captured.inputs) if slot.role in DONATED[kind]}
        program = Program(graph, frozenset(donate), torch.device("meta"), "card", "cuda")
        inputs = [
            torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
            for slot in captured.inputs
        ]
        with torch.inference_mode():
            results = program.call(inputs)
        assert [(tuple(r.shape), dtype_name(r.dtype)) for r in results] == program.forms
        assert {r.device.type for r in results} <= {"meta"}
