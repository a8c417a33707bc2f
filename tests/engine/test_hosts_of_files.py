"""Clusters whose file names hosts: the hosts meet, and the file's devices train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from agents import end, free_address, patched_secret, start_agent
from crews import Crews
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.cli import devices, options
from hetpipe.cluster import Cluster
from hetpipe.cluster.member import available_cores
from hetpipe.crew.agent import serve_once
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, ClusterError
from hetpipe.hosts.meeting import parse_address
from hetpipe.profile.links import measure_links

SAMPLES, LATENCY_S = 8, 0.01
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(2))
HOSTS = """\
[[host]]
name = "h0"

[[host]]
name = "h1"
"""
FILE = f"""\
transport = "tcp"

{HOSTS}
[[device]]
host = "h1"
device = "numpy:cpu:0"
cores = [{available_cores()[-1]}]
speed = 0.5

[[device]]
host = "h0"
id = "own"
device = "numpy:cpu:0"

[[link]]
between = ["h0/own", "h1/numpy:cpu:0"]
latency = "10 ms"
"""


@pytest.fixture(scope="module")
def h1() -> Iterator[str]:
    """Yield the address of an agent that stays, with the name h1."""
    address = free_address()
    agent = start_agent("--stay", "--listen", address, "--name", "h1")
    yield address
    agent.kill()
    end(agent)


@contextmanager
def met(text: str, folder: Path, agent: str) -> Iterator[Cluster]:
    """Yield the cluster of a file with the hosts h0, this process, and h1."""
    (folder / "lab.toml").write_text(text)
    with patched_secret():
        cluster = Cluster.load_hosts(folder / "lab.toml", agents=[agent], name="h0", limit_s=60)
    assert cluster.connections is not None
    try:
        yield cluster
    finally:
        cluster.connections.close()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def open_pipeline(crew: Crew) -> hp.Pipeline:
    return pipeline(
        crew, make_model(), nn.functional.cross_entropy, (X, Y), crew.cluster.ids,
        optimizer=hp.optim.sgd(0.1), microbatches=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(crews: Crews) -> list[float]:
    """Return the losses on one host."""
    with open_pipeline(crews(("numpy:cpu:0",) * 2, "shared-memory")) as pipe:
        return losses(pipe)


def losses(pipe: hp.Pipeline) -> list[float]:
    return [result.loss for result in pipe.run([(X, Y)] * 3)]


def test_a_file_trains_over_hosts_and_its_link_delays_and_is_priced(
    tmp_path: Path, h1: str, expected: list[float]
) -> None:
    with met(FILE, tmp_path, h1) as cluster, Crew.start(cluster) as crew:
        far, own = cluster.members
        assert (far.id, far.host, far.server, far.speed) == ("h1/numpy:cpu:0", "h1", "h1", 0.5)
        assert (own.id, own.host, own.cores) == ("h0/own", "h0", ())
        assert own.machine == far.machine != ""
        assert cluster.transport == "tcp"
        with open_pipeline(crew) as pipe:
            assert losses(pipe) == expected
            timeline = pipe.timeline
        spans = {str(span.action): span for span in timeline.spans}
        near_s = 2 * timeline.clock_error_s
        for sent, received in (("0SF0", "1RF0"), ("1SB1", "0RB1")):
            assert spans[received].start_s > spans[sent].start_s + LATENCY_S - near_s
        links, _ = measure_links(crew)
    assert links.keys() == {(far.id, own.id), (own.id, far.id)}
    for link in links.values():
        assert link.label == "emulated"
        assert link.latency_s > LATENCY_S / 2  # a busy machine disturbs the measurement


BOARDS = """\
[[host]]
name = "h0"

[[host]]
name = "h1"

[[device]]
host = "h0"
board = "v100-sxm-16"
numerics = "numpy:cpu:0"

[[device]]
host = "h1"
board = "v100-sxm-16"
numerics = "numpy:cpu:0"

[network]
bandwidth = "1 Gb/s"
latency = "7 ms"
"""


def test_boards_of_hosts_train_with_the_modelled_network(
    tmp_path: Path, h1: str, expected: list[float]
) -> None:
    with met(BOARDS, tmp_path, h1) as cluster, hp.Pipeline(
        make_model(), nn.functional.cross_entropy, (X, Y), cluster=cluster,
        optimizer=hp.optim.sgd(0.1), cuts=[2], microbatches=2, schedule="1f1b",
    ) as pipe:  # fmt: skip
        assert [stage.devices for stage in pipe.plan.stages] == [
            ("h0/v100-sxm-16.0",), ("h1/v100-sxm-16.0",)
        ]  # fmt: skip
        assert losses(pipe) == expected
        assert pipe.timeline.label == "modelled"
        assert 0.014 < pipe.modelled_step_s < 0.016


BARE = f"""\
{HOSTS}
[[device]]
host = "h1"
device = "numpy:cpu:0"
"""


def test_a_host_without_devices_offers_its_usual_ones(tmp_path: Path, h1: str) -> None:
    with met(BARE, tmp_path, h1) as cluster:
        assert cluster.ids[0] == "h1/numpy:cpu:0"
        local = Cluster.local()
        assert cluster.ids[1:] == tuple(f"h0/{id}" for id in local.ids)
        assert cluster.members[1].cores == local.members[0].cores
        assert cluster.groups() == (cluster.ids[:1], cluster.ids[1:])


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        (
            "numpy:cpu:0", "numpy:gpu:7", BackendError,
            r"toml:9: member 'h1/numpy:gpu:7': .*numpy:gpu:7",
        ),
        ('cpu:0"', 'cpu:0"\ncores = [4096]', ClusterError, r"toml:9: h1/.*cores \[4096\] are not"),
    ],
)  # fmt: skip
def test_a_device_or_core_that_the_host_lacks(
    tmp_path: Path, h1: str, old: str, new: str, error: type[Exception], words: str
) -> None:
    text = BARE.replace(old, new) + '[[device]]\nhost = "h0"\ndevice = "numpy:cpu:0"\n'
    with met(text, tmp_path, h1) as cluster, pytest.raises(error, match=words):
        Crew.start(cluster)


def test_commands_take_the_file_of_the_hosts_that_have_met(
    tmp_path: Path, h1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = tmp_path / "lab.toml", tmp_path / "found.json"
    with met(FILE, tmp_path, h1) as cluster:
        connections = cluster.connections
        assert connections is not None
        for module in (options, devices):
            monkeypatch.setattr(module, "hosts_of_command", lambda: connections)
        made = options.make_cluster(file, None, None, ["h0/own=0.25"])
        assert [(member.id, member.speed) for member in made.members] == [
            ("h1/numpy:cpu:0", 0.5), ("h0/own", 0.25),
        ]  # fmt: skip
        devices.command(backends="numpy", cluster=file, json=str(found))
        hosts = json.loads(found.read_text())["hosts"]
        assert [(host["name"], host["devices"][0]["joins"]) for host in hosts] == [
            ("h0", True), ("h1", True),
        ]  # fmt: skip
        file.write_text(FILE.replace('"h1', '"h2'))
        with pytest.raises(ClusterError, match="hosts h0, h2, and h0, h1 have met; absent: h2; un"):
            options.make_cluster(file, None, None, None)
    for module in (options, devices):
        monkeypatch.setattr(module, "hosts_of_command", lambda: None)
    with pytest.raises(ClusterError, match=r"hosts h2, h0 have not met: .* by torchrun"):
        devices.command(cluster=file)


def test_options_of_a_backend_apply_where_its_devices_are(tmp_path: Path, h1: str) -> None:
    text = BARE.replace("numpy", "pytorch") + '[[device]]\nhost = "h0"\ndevice = "numpy:cpu:0"\n'
    text += '[backend.pytorch]\ncompile = "inductor"\n'
    with met(text, tmp_path, h1) as cluster, Crew.start(cluster) as crew:
        assert "inductor" in crew.infos["h1/pytorch:cpu:0"].driver


def test_hosts_of_a_file_that_do_not_come_and_others_that_do_are_named(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(FILE)
    address = free_address()
    words = r"no host of this cluster is 'h2'; .*known: h0, h1"
    with patched_secret(), ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            Cluster.load_hosts, tmp_path / "lab.toml", address, name="h0", limit_s=1.0
        )
        with pytest.raises(ClusterError, match=words):
            serve_once(parse_address(address), "h2", 5.0)
        with pytest.raises(ClusterError, match=f"0 of 1 other hosts .*remove h1 from .*{words}"):
            waiting.result()
    with pytest.raises(ClusterError, match=r"no host of this cluster is 'h5'; .* give this"):
        Cluster.load_hosts(tmp_path / "lab.toml", address, name="h5")
