"""Hosts with unlike environments: other versions of Python, torch, numpy and hetpipe."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import SECRET, end, free_address, hosts, patched_secret
from pipelines import user_pipeline
from torch import nn
from torch.nn.functional import cross_entropy

import hetpipe as hp
from hetpipe.cluster import Cluster
from hetpipe.cluster.hosts import notes_of
from hetpipe.crew.agent import serve_once
from hetpipe.crew.crew import Crew
from hetpipe.errors import ClusterError, UnsupportedOperatorError
from hetpipe.hosts import connection
from hetpipe.hosts.door import Door
from hetpipe.hosts.facts import own_facts
from hetpipe.packing import Packed, pack

BATCH = torch.linspace(-1, 1, 24).reshape(6, 4), torch.arange(6) % 4
DEVICE = "numpy:cpu:0"
PYTHON = os.environ.get("HETPIPE_OTHER_PYTHON", "")
"""The Python of another environment with hetpipe; `make lowest` gives the lowest torch's."""
KNOWN = {"numpy.zeros", "builtins.list", "collections.defaultdict"}
"""Names in messages that do not belong to hetpipe; each is in all versions."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with hosts(f"h0/{DEVICE}", f"h1/{DEVICE}") as cluster, Crew.start(cluster) as crew:
        yield crew


def open_pipeline(crew: Crew, **options: Any) -> hp.Pipeline:
    options = {"cuts": [1], "microbatches": 2, "schedule": "1f1b", **options}
    return user_pipeline(crew, make_model(), cross_entropy, BATCH, **options)


class Names(pickle.Unpickler):
    """Notes what a pickle names."""

    seen: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.seen.add(f"{module}.{name}")
        return super().find_class(module, name)


def test_messages_name_only_what_is_in_all_versions(
    two: Crew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: set[str] = set()

    def noted(packed: Packed) -> Any:
        names = Names(io.BytesIO(packed.parts[0]), buffers=packed.parts[1:])
        names.seen = seen
        return names.load()

    def packed(message: Any) -> Packed:
        parts = pack(message)
        noted(parts)
        return parts

    monkeypatch.setattr(Packed, "unpack", noted)
    monkeypatch.setattr(connection, "pack", packed)
    adamw = hp.optim.adamw(lr=1e-2)
    with open_pipeline(two, optimizer=adamw, clip_norm=1.0, priced=True) as pipe:
        pipe.step(*BATCH)
        pipe.evaluate([BATCH])
        pipe.predict(BATCH[0])
        pipe.diagnose(*BATCH)
        pipe.save(tmp_path / "saved")
    assert "hetpipe.wire.messages.Step" in seen
    assert {name for name in seen if not name.startswith("hetpipe.")} <= KNOWN


def test_an_operator_that_a_host_lacks_is_refused(two: Crew) -> None:
    two.call(["m1"], "engine_backends:lose_operator", "aten.tanh.default")
    try:
        text = r"stage 1 on m1: numpy:cpu:0 cannot run aten.tanh.default of layer 2: torch \d"
        with pytest.raises(UnsupportedOperatorError, match=text):
            open_pipeline(two)
        with open_pipeline(two, cuts=[2]) as pipe:  # the tanh is on the other host
            pipe.step(*BATCH)
    finally:
        two.call(["m1"], "engine_backends:lose_operator", "")


def test_another_version_of_hetpipe_is_refused_with_both_versions() -> None:
    older = replace(own_facts("h0"), hetpipe="0.0.9")
    door = Door(("127.0.0.1", 0), SECRET.encode(), older, {})
    version = own_facts().hetpipe
    text = f"h0 refuses: the caller has hetpipe '{version}', and the host that it calls 0.0.9:"
    with patched_secret(), pytest.raises(ClusterError, match=text):
        serve_once(door.address, "h1", 5.0)
    door.close()


def test_a_host_without_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(ClusterError, match="need the package cryptography: pip install"):
        Door(("127.0.0.1", 0), b"another secret of the tests", own_facts(), {})


def test_a_plan_tells_of_environments_of_one_machine(two: Crew) -> None:
    with open_pipeline(two) as pipe:
        assert "hosts h0, h1 are environments of one machine" in str(pipe.plan)


def test_a_plan_tells_of_unlike_versions(two: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = two.cluster.connections
    assert connections is not None
    assert len(notes_of(connections)) == 1
    other = connections.others["h1"]
    unlike = replace(other.facts, machine="another", torch="2.11.0", python="3.13.0")
    monkeypatch.setattr(other, "facts", unlike)
    (note,) = notes_of(connections)
    assert "h1 has Python 3.13.0, torch 2.11.0" in note


@contextmanager
def unlike(*devices: str) -> Iterator[Cluster]:
    """Yield a cluster of this environment, host h0, and the other one, host h1."""
    address = free_address()
    agent = subprocess.Popen(
        [PYTHON, "-m", "hetpipe", "agent", "--meet", address, "--name", "h1"],
        env={**os.environ, "HETPIPE_SECRET": SECRET},
        stderr=subprocess.PIPE,
        text=True,
    )
    with patched_secret():
        cluster = Cluster.hosts(address, 2, devices=devices, name="h0", limit_s=60)
    assert cluster.connections is not None
    try:
        yield cluster
    finally:
        cluster.connections.close()
        assert end(agent)[0] == 0


def problem(name: str) -> tuple[nn.Module, Any, Any, list[int]]:
    """Return a model, its loss, a mini-batch and a cut."""
    torch.manual_seed(0)
    if name == "bert":
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**sizes, **layers)
        )
        x = {"input_ids": torch.arange(96).reshape(8, 12) % 50}
        x["attention_mask"] = torch.ones(8, 12, dtype=torch.long)
        return (
            model.train(),
            lambda out, y: cross_entropy(out.logits, y),
            (x, torch.arange(8) % 2),
            [4],
        )
    from hetpipe.zoo.load import load_workload

    workload = load_workload(name)
    return workload.model, workload.loss_fn, next(workload.batches(8, 0)), [2]


def train(cluster: Cluster, name: str) -> list[float]:
    model, loss_fn, batch, cuts = problem(name)
    with hp.Pipeline(
        model, loss_fn, batch, cluster=cluster, optimizer=hp.optim.sgd(lr=1e-2), cuts=cuts,
        microbatches=2, schedule="1f1b",
    ) as pipe:  # fmt: skip
        return [result.loss for result in pipe.run([batch] * 4)]


@pytest.mark.skipif(not PYTHON, reason="HETPIPE_OTHER_PYTHON names no Python with hetpipe")
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("digits", ["numpy:cpu:0", "numpy:cpu:0"]),
        ("gpt", ["pytorch:cpu:0", "pytorch:cpu:0"]),
        ("bert", ["pytorch:cpu:0", "numpy:cpu:0"]),
        ("bert", ["numpy:cpu:0", "pytorch:cpu:0"]),
        ("digits", ["pytorch:cpu:0", "opencl:pocl:0"]),
    ],
)
def test_losses_over_unlike_environments_are_those_of_one(name: str, devices: list[str]) -> None:
    alone = train(Cluster.local(devices=devices), name)
    with unlike(*(f"h{n}/{device}" for n, device in enumerate(devices))) as cluster:
        assert train(cluster, name) == pytest.approx(alone, rel=1e-6)
