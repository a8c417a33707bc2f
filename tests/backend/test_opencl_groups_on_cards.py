"""Every kernel of a training on a graphics card has work-groups of many work-items."""

from __future__ import annotations

from math import prod

import nvptx
import pytest

LEAST = 32
"""Work-items of the smallest group that fills NVIDIA's units of 32 work-items."""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits", "gpt", "lstm", "resnet18-small", "bert-large-small"])
def test_every_launch_of_a_training_has_groups(model: str) -> None:
    """Check the forward, the backward and the update of models of the zoo."""
    programs = nvptx.lowered(model, nvptx.card())
    assert set(programs) == {"forward", "backward", "update"}
    found = {
        (launch.kernel.name, launch.local_size, launch.global_size)
        for program in programs.values()
        for launch in program.launches
        if launch.local_size is None or prod(launch.local_size) < LEAST
    }
    assert not found, sorted(found)
