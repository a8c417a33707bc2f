"""The engine's own time per action, as a profile measures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.packing import pack
from hetpipe.papers.overhead import empty_request, load_empty
from hetpipe.profile import measure
from hetpipe.profile.links import engine_s
from hetpipe.profile.measure import profile
from hetpipe.schedule.generators import generate
from hetpipe.wire.messages import Keep

CLUSTER = Cluster((Member("a", "numpy:cpu:0"), Member("b", "numpy:cpu:0")), transport="local")


def test_the_engines_time_is_small() -> None:
    with Crew.start(CLUSTER) as crew:
        times_s = engine_s(crew, {"a": 64, "b": 128})
    assert set(times_s) == {"a", "b"}
    assert all(0.0 <= time_s < 0.1 for time_s in times_s.values())


def recorded(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list, to which each later message to a worker is added."""
    sent: list[Any] = []
    send = crew._fleet.send

    def note(worker: int, message: Any) -> None:
        sent.append(message)
        send(worker, message)

    monkeypatch.setattr(crew._fleet, "send", note)
    return sent


def test_a_step_sends_a_worker_no_more_if_there_are_more_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step sends the schedule as well."""
    nbytes: dict[int, int] = {}
    for count in (3, 9):
        members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(count))
        with Crew.start(Cluster(members, transport="local")) as crew:
            load_empty(crew, Keep())
            request = empty_request(generate("1f1b", count, 4), 4)
            crew.step(request)
            sent = recorded(crew, monkeypatch)
            crew.step(request)
        assert len(sent) == count
        nbytes[count] = sum(map(len, pack(sent[1]).parts))  # of a stage between others
    assert nbytes[9] == nbytes[3]


@pytest.mark.slow
def test_the_engines_time_counts_once_per_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one extra second per pass, a layer takes it once, and so does a stage of all layers."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "engine_s", lambda crew, orders: dict.fromkeys(orders, 1.0))
    example = (torch.randn(8, 20), torch.randint(0, 5, (8,)))
    captured = Captured(MLP(), F.cross_entropy, example)
    with Crew.start(CLUSTER) as crew:
        table = profile(captured, crew, hp.optim.sgd(0.1), [4])[4]
    for device in table.devices.values():
        assert device.overhead_s > 1.0
        assert all(1.0 < layer.forward_s < 1.5 for layer in device.layers)
        assert all(layer.update_s > 1.0 for layer in device.layers if layer.update_s)
    assert len(table.layers) > 1
    assert all(1.0 < time_s < 1.5 for time_s in table.passes_s("a", 0, len(table.layers)))
