"""A model trains over several hosts as it does on one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import call_until_it_fails, end, free_address, hosts, patched_secret, start_agent
from crews import Crews, eventually, has_ended
from pipelines import pipeline
from test_listening import ports_of
from torch import nn

import hetpipe as hp
from hetpipe.check.examination import examination
from hetpipe.cluster import Cluster
from hetpipe.conformance.check import Level
from hetpipe.conformance.run import run_suite
from hetpipe.crew.agent import serve_once
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, ClusterError, WorkerError
from hetpipe.hosts.door import Door
from hetpipe.hosts.facts import own_facts
from hetpipe.hosts.meeting import parse_address
from hetpipe.sdk.host.registry import devices_of

SAMPLES = 12
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(2))
DEVICE = "numpy:cpu:0"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def train(crew: Crew, members: Any, schedule: str, **options: Any) -> list[float]:
    """Return the losses of a few mini-batches."""
    with pipeline(
        crew, make_model(), nn.functional.cross_entropy, (X, Y), members, schedule,
        optimizer=hp.optim.adamw(lr=1e-2), **{"microbatches": 4, **options},
    ) as pipe:  # fmt: skip
        return [result.loss for result in pipe.run([(X, Y)] * 4)]


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with hosts(f"h0/{DEVICE}", f"h1/{DEVICE}") as cluster, Crew.start(cluster) as crew:
        yield crew


@pytest.mark.parametrize(
    ("members", "schedule", "options"),
    [
        ("01", "1f1b", {}),
        ("01", "1f1b", {"clip_norm": 0.1}),
        ("01", "pipedream", {}),
        ("0101", "interleaved", {}),
        ([["m0", "m1"]], "1f1b", {"shares": [(2.0, 1.0)], "microbatches": 2}),
    ],
)
def test_losses_are_those_of_one_host(
    two: Crew, crews: Crews, members: Any, schedule: str, options: dict[str, Any]
) -> None:
    local = crews((DEVICE,) * 2, "shared-memory")
    assert train(two, members, schedule, **options) == train(local, members, schedule, **options)


def test_every_call_of_a_pipeline_gives_the_results_of_one_host(
    two: Crew, crews: Crews, tmp_path: Path
) -> None:
    local = crews((DEVICE,) * 2, "shared-memory")
    far, near = calls(two, tmp_path / "far"), calls(local, tmp_path / "near")
    assert far.keys() == near.keys()
    for name, value in near.items():
        assert is_same(far[name], value), name


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def calls(crew: Crew, folder: Path) -> dict[str, Any]:
    """Return the results of a pipeline's calls, by name."""

    def opened(checkpoint: Path | None = None) -> hp.Pipeline:
        return pipeline(
            crew, make_model(), nn.functional.cross_entropy, (X, Y), "01",
            optimizer=hp.optim.adamw(lr=1e-2), microbatches=4, checkpoint=checkpoint,
        )  # fmt: skip

    found: dict[str, Any] = {}
    with opened() as pipe:
        found["loss"], found["gradients"] = pipe.gradients(X, Y)
        found["history"] = [
            each.values["loss"] for each in pipe.fit([(X, Y)] * 2, 2, progress=False).epochs
        ]
        found["evaluated"] = pipe.evaluate([(X, Y)]).loss
        found["predicted"] = pipe.predict(X)
        found["diagnosis"] = pipe.diagnose(X, Y).verdict
        found["advice"] = pipe.explain().why_no_advice
        found["state"] = pipe.state_dict()
        pipe.save(folder)
        found["next"] = pipe.step(X, Y)
    with opened(folder) as pipe:
        found["resumed"] = pipe.step(X, Y)
    return found


def test_a_diagnosis_names_the_faulty_operator_of_another_host(two: Crew) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    two.call(["m1"], "engine_backends:spoil_operator", "aten.sigmoid.default", 0.01)
    try:
        with pipeline(
            two, model, nn.functional.cross_entropy, (X, Y), "01",
            optimizer=hp.optim.adamw(lr=1e-2), microbatches=2,
        ) as pipe:  # fmt: skip
            found = pipe.diagnose(X, Y)
    finally:
        two.call(["m1"], "engine_backends:spoil_operator", "aten.sigmoid.default", 0.0)
    assert found.verdict == "operator", str(found)
    assert found.culprit is not None
    assert found.culprit.member == "m1"
    assert found.culprit.operators == ("aten.sigmoid.default",)


def test_values_of_another_host_come_one_by_one_and_its_error_at_last(two: Crew) -> None:
    connections = two.cluster.connections
    assert connections is not None
    for host in ("h0", "h1"):
        assert [*connections.iterate(host, examination, ["numpy"], False)] == [
            *examination(["numpy"], False)
        ]
    info, *_ = devices_of("numpy")
    results = connections.iterate("h1", run_suite, info, Level.CORE, 60.0, ("nothing",))
    with pytest.raises(BackendError, match="host 'h1': no group 'nothing' of checks"):
        next(results)


@pytest.mark.parametrize("transport", ["auto", "tcp", "tls"])
def test_workers_of_another_host_talk_to_each_other_and_to_a_third(
    crews: Crews, transport: str
) -> None:
    devices = f"h1/{DEVICE}", f"h1/{DEVICE}", f"h2/{DEVICE}"
    with hosts(*devices, transport=transport) as cluster, Crew.start(cluster) as crew:
        assert [member.host for member in cluster.members] == ["h1", "h1", "h2"]
        local = crews((DEVICE,) * 3, "shared-memory")
        assert train(crew, "012", "1f1b") == train(local, "012", "1f1b")


def test_each_host_listens_on_one_port() -> None:
    meet, before = free_address(), ports_of(os.getpid())
    agent = start_agent("--meet", meet, "--name", "h1")
    devices = [f"h0/{DEVICE}", f"h1/{DEVICE}"]
    with patched_secret():
        cluster = Cluster.hosts(meet, 2, name="h0", limit_s=60, devices=devices, transport="tls")
    assert cluster.connections is not None
    with Crew.start(cluster) as crew:
        train(crew, devices, "1f1b")
        theirs = ports_of(agent.pid)
        assert theirs == {cluster.connections.others["h1"].door[1]}
        assert ports_of(os.getpid()) - theirs - before == {parse_address(meet)[1]}
    cluster.connections.close()
    assert end(agent)[0] == 0


def test_spans_of_other_hosts_are_on_the_clock_of_the_controller(two: Crew) -> None:
    with pipeline(
        two, make_model(), nn.functional.cross_entropy, (X, Y), "01",
        optimizer=hp.optim.adamw(lr=1e-2), microbatches=2,
    ) as pipe:  # fmt: skip
        pipe.step(X, Y)
        spans = {str(span.action): span for span in pipe.timeline.spans}
    assert spans["0F0"].end_s < spans["1F0"].start_s + 1e-3
    assert spans["1B1"].start_s < spans["0B1"].start_s + 1e-3


@pytest.mark.parametrize("kill", ["agent", "worker"])
def test_a_lost_host_ends_the_training_by_name(kill: str) -> None:
    address = free_address()
    agent = start_agent("--meet", address, "--name", "h1")
    with patched_secret():
        cluster = Cluster.hosts(
            address, 2, name="h0", limit_s=60, devices=[f"h0/{DEVICE}", f"h1/{DEVICE}"]
        )
    with Crew.start(cluster) as crew:
        workers = crew.call(list(crew.infos), "engine_backends:pid")
        os.kill(agent.pid if kill == "agent" else workers[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="host 'h1'"):
            call_until_it_fails(crew)
    assert eventually(lambda: all(map(has_ended, workers)))  # the system ends them after the agent
    assert cluster.connections is not None
    cluster.connections.close()
    assert end(agent)[0] == (-signal.SIGKILL if kill == "agent" else 0)


def test_a_wrong_secret_is_refused() -> None:
    door = Door(("127.0.0.1", 0), b"the secret of the controller", own_facts(), {})
    with patched_secret(), pytest.raises(ClusterError, match="another secret"):
        serve_once(door.address, "h1", 5.0)
    door.close()


def test_a_refused_host_is_named_where_it_lacks() -> None:
    address = free_address()
    agent = start_agent("--meet", address, "--name", "H0")
    with patched_secret(), pytest.raises(ClusterError, match="there is a host 'h0' already"):
        Cluster.hosts(address, 2, name="h0", limit_s=10)
    assert end(agent)[0] == 1


def test_hosts_that_never_come_are_counted() -> None:
    with patched_secret(), pytest.raises(ClusterError, match="0 of 1 other hosts have come"):
        Cluster.hosts(free_address(), 2, limit_s=0.1)


@pytest.mark.parametrize(
    ("meeting", "words"),
    [
        ({"meet": "127.0.0.1:70000", "count": 2}, "no address"),
        ({"meet": "127.0.0.1:29400"}, "count is None"),
        ({"meet": "127.0.0.1", "agents": ["127.0.0.1"]}, "meet and agents were given"),
        ({}, "start this script with torchrun"),
        ({"meet": "127.0.0.1", "count": 2, "transport": "tsl"}, "did you mean tls"),
    ],
)
def test_a_meeting_that_cannot_take_place_is_refused(meeting: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Cluster.hosts(**meeting, limit_s=1)
