"""Calls that run while the controller works, and stages that devices compile ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from captures import shared
from engine_backends import EarlyBackend, FaultyBackend
from models import MLP, batches
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import WorkerError
from hetpipe.profile.measure import profile
from hetpipe.sdk.host import registry

PAIR = ("numpy:cpu:0", "early:cpu:0")
FORECASTS = "engine_backends:forecasts"


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(EarlyBackend)
    registry.register_backend(FaultyBackend)


def cluster(*devices: str, transport: str = "shared-memory") -> Cluster:
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    return Cluster(members, transport=transport)


@pytest.mark.parametrize("transport", ["shared-memory", "local"])
def test_calls_may_begin_before_their_workers_and_end_in_any_order(transport: str) -> None:
    with Crew.start(cluster(*PAIR, transport=transport), wait=False) as crew:
        first = crew.begin_each("engine_backends:scale", {"m0": (1.0, 0.2), "m1": (2.0, 0.0)})
        second = crew.begin_each("engine_backends:scale", {"m1": (3.0, 0.0)})
        assert crew.call(["m1"], "engine_backends:scale", 4.0, 0.0) == [(PAIR[1], 8.0)]
        assert second() == {"m1": (PAIR[1], 6.0)}
        assert first() == {"m0": (PAIR[0], 2.0), "m1": (PAIR[1], 4.0)}
        assert first() == {"m0": (PAIR[0], 2.0), "m1": (PAIR[1], 4.0)}
        assert set(crew.infos) == {"m0", "m1"}


def test_a_speed_waits_for_no_reply() -> None:
    """Another thread may set it while the user's thread waits for replies."""
    with Crew.start(cluster(*PAIR), wait=False) as crew:
        crew.set_speed("m0", 0.5)
        assert crew._opened is None
        assert tuple(crew.infos) == crew.cluster.ids
        assert crew.cluster.member("m0").speed == 0.5


def test_a_call_fails_if_the_worker_cannot_open_its_device() -> None:
    with Crew.start(cluster("numpy:cpu:0", "faulty:shut:0"), wait=False) as crew:
        crew.begin_each("engine_backends:nap", {"m0": (0.0,), "m1": (0.0,)})
        with pytest.raises(WorkerError, match="bring it back"):
            _ = crew.infos


def test_the_next_call_reports_a_failed_call() -> None:
    with Crew.start(cluster("numpy:cpu:0")) as crew:
        crew.begin_each("engine_backends:nap", {"m0": (-1.0,)})
        with pytest.raises(WorkerError, match="non-negative"):
            crew.call(["m0"], "engine_backends:pid")


def forecasts(crew: Crew) -> tuple[set[str], set[str]]:
    ((announced, compiled),) = crew.call(["m1"], FORECASTS)
    return set(announced), set(compiled)


@pytest.mark.slow
def test_a_profile_announces_the_first_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    (x, y), *_ = batches(1)
    captured, optimizer = shared(MLP(), F.cross_entropy, (x, y)), hp.optim.sgd(lr=0.1)
    with Crew.start(cluster(*PAIR)) as crew:
        profile(captured, crew, optimizer, [4])
        forecasts(crew)
        profile(captured, crew, optimizer, [2, 1])
        announced, compiled = forecasts(crew)
    assert announced
    assert announced < compiled, "the passes of the other size were not announced"


def test_the_stages_of_replicas_are_announced() -> None:
    (x, y), *_ = batches(1)
    with (
        Crew.start(cluster(*PAIR)) as crew,
        pipeline(
            crew, MLP(), F.cross_entropy, (x, y), [("m0", "m1")], "gpipe", 2,
            shares=[(1, 1)], optimizer=hp.optim.sgd(lr=0.1),
        ) as pipe,
    ):  # fmt: skip
        announced, compiled = forecasts(crew)
        assert announced == compiled != set()
        pipe.step(x, y)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))


def test_graphs_with_unsupported_operators_are_not_announced() -> None:
    example = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    captured = shared(Waves(), F.cross_entropy, example)
    count = len(captured.layer_names)
    table = registry.decompositions_of("early")
    stages = captured.stage_graphs(range(1, count), [table] * count, [4], None)
    with Crew.start(cluster(*PAIR)) as crew:
        crew.compile_ahead({"m0": stages, "m1": stages})
        announced, _ = forecasts(crew)
        (backward,) = announced  # no forward graph, because it has a sine
        assert "addmm" not in backward
