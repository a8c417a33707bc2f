"""An asynchronous pipeline of torch, OpenCL and the FPGA emulator has the losses of torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.papers.learning import DEVICES, ON_DEVICES, PIPEDREAM, PIPEOPTIM
from hetpipe.papers.trial import Subject

pytestmark = pytest.mark.slow

STEPS = 10


def crew_of(devices: tuple[str, ...]) -> Crew:
    members = tuple(Member(f"stage {n}", device) for n, device in enumerate(devices))
    return Crew.start(Cluster(members, transport="local"))


def test_three_kinds_of_device_train_as_torch_does() -> None:
    pytest.importorskip("sklearn")
    found = [info.id for info in hp.discover_devices()[0]]
    absent = [device for device in DEVICES if device not in found]
    if absent:
        pytest.skip(f"no {', '.join(absent)}")
    task = replace(ON_DEVICES, steps=STEPS)
    subject = Subject(task.model, task.mini_batch, seed=0)
    with crew_of(DEVICES) as crew:
        losses = subject.trial(task, PIPEOPTIM, crew).losses
    with crew_of(DEVICES[:1] * len(DEVICES)) as crew:
        expected = subject.trial(task, PIPEOPTIM, crew).losses
        stashed = subject.trial(task, PIPEDREAM, crew).losses
    assert losses == pytest.approx(expected, rel=1e-4)
    assert stashed[-1] != pytest.approx(expected[-1], rel=1e-2)  # another policy gives other losses
