"""A fork of the process cannot use its parent's pipeline and does not harm it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agents import SECRET
from models import MLP, batches
from pipelines import user_pipeline

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError


def opened(crew: Crew) -> hp.Pipeline:
    torch.manual_seed(0)
    return user_pipeline(
        crew, MLP(), F.cross_entropy, batches(1)[0], cuts=[2], microbatches=2, schedule="1f1b"
    )


def messages_of_a_fork(calls: list[Callable[[], Any]]) -> list[str]:
    """Return the errors of these calls in a fork, which then ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        texts = []
        for call in calls:
            try:
                texts.append(f"no error, but {call()}")
            except HetpipeError as error:
                texts.append(str(error))
        os.write(writing, json.dumps(texts).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return list(json.loads(text))


def test_a_refused_call_of_a_fork_ends_no_workers() -> None:
    """The end of a crew over hosts would send messages on connections of the parent."""
    with Crew.start(Cluster((Member("m0", "numpy:cpu:0"),), transport="shared-memory")) as crew:
        calls = [
            lambda: crew.begin_each("engine_backends:pid", {"m0": ()}),
            lambda: crew.set_speed("m0", 0.5), lambda: crew._control.failed,
        ]  # fmt: skip
        begun, set_speed, failed = messages_of_a_fork(calls)
    assert "is a fork of process" in begun
    assert "is a fork of process" in set_speed
    assert failed == "no error, but False"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_every_call_is_refused_in_a_fork(transport: str, tmp_path: Path) -> None:
    """Otherwise a fork's step would take the losses that its parent waits for."""
    data = batches(4)
    members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(2))
    with Crew.start(Cluster(members, transport=transport)) as crew:
        with opened(crew) as pipe:
            expected = [pipe.step(*batch) for batch in data]
        with opened(crew) as pipe:
            losses = [pipe.step(*batch) for batch in data[:2]]
            own: list[Callable[[], Any]] = [
                lambda: pipe.step(*data[2]), lambda: next(pipe.run(data)),
                lambda: pipe.evaluate([data[2]]).loss, lambda: pipe.gradients(*data[2]),
                lambda: pipe.diagnose(*data[2]), lambda: pipe.save(tmp_path), pipe.state_dict,
                pipe.rebalance, pipe.flush, pipe.corrected, lambda: pipe.set_speed("m0", 0.5),
            ]  # fmt: skip
            others = [lambda: crew.call(["m0"], "builtins:id"), lambda: crew.read("param")]
            ends: list[Callable[[], Any]] = [pipe.close, crew.close, crew._fleet.close]
            texts = messages_of_a_fork([*own, *others, *ends])
            for text in texts[: len(own)]:
                assert f"a fork of process {os.getpid()}, which made this pipeline" in text
            for text in texts[len(own) : -len(ends)]:
                assert f"a fork of process {os.getpid()}, which started these workers" in text
            assert texts[-len(ends) :] == ["no error, but None"] * len(ends)
            losses += [pipe.step(*batch) for batch in data[2:]]
    assert losses == expected


AGENT = """
from agents import free_address, start_agent
meet = free_address()
agent = start_agent("--meet", meet, "--name", "h1")
devices = ["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
cluster = Cluster.hosts(meet, 2, name="h0", limit_s=60, devices=devices)
"""
ALONE = """
members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(2))
cluster = Cluster(members, transport="distributed")
"""
SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
sys.path.insert(0, {tests!r})
from test_forks import *
{cluster}
pipe = opened(Crew.start(cluster))
losses = [pipe.step(*batches(1)[0])]
if (child := os.fork()) == 0:
    signal.alarm(20)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(pipe.step(*batches(1)[0]) < losses[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [ALONE, AGENT], ids=["alone", "hosts"])
def test_a_fork_that_exits_ends_no_worker(cluster: str) -> None:
    here = Path(__file__).parent
    text = SCRIPT.format(here=str(here), tests=str(here.parent), cluster=cluster)
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True,
        env={**os.environ, "HETPIPE_SECRET": SECRET},
    )  # fmt: skip
    assert (ended.stdout, ended.returncode) == ("True\n", 0), ended.stderr


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pipelines_and_crews_cannot_be_copied(crew: Crew, duplicate: Callable[[Any], Any]) -> None:
    with opened(crew) as pipe, pytest.raises(HetpipeError, match=r"with save\(folder\)"):
        duplicate(pipe)
    with pytest.raises(HetpipeError, match="a crew cannot be pickled or copied"):
        duplicate(crew)
