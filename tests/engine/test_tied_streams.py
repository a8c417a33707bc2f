"""Asynchronous training of models with tied weights equals a float64 reference in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import TRANSPORTS, Crews
from delayed import ADAM, SGD
from found_devices import infos
from pipelines import pipeline
from tied_delays import SUBJECTS, Subject, Training, delays, distance

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

DEVICES = ("pytorch:cpu:0",) * 4
COUNT = 9  # mini-batches until the flush in the middle
CLOSE = 1e-10


def noam(stages: int) -> list[int]:
    return [stages - n for n in range(stages)]


def hiding(stages: int) -> list[int]:
    return [2 * (stages - n) - 1 for n in range(stages)]


def open_stream(
    crew: Crew,
    subject: Subject,
    stages: int,
    policy: str,
    optimizer: Any,
    microbatches: int = 1,
    depths: Sequence[int] | None = None,
    **options: Any,
) -> hp.Pipeline:
    example = subject.start(), subject.loss_fn, subject.batch(0)
    members = options.pop("members", "0123"[:stages])
    return pipeline(
        crew, *example, members, "pipedream", microbatches, cuts=subject.cuts[stages],
        weights=policy, in_flight=depths or noam(stages), optimizer=optimizer, **options,
    )  # fmt: skip


def losses(pipe: hp.Pipeline, subject: Subject, numbers: range) -> list[float]:
    return [result.loss for result in pipe.run(subject.batch(b) for b in numbers)]


FIRST, SECOND = range(COUNT), range(COUNT, 2 * COUNT)
CASES = [
    ("chain", stages, policy, depth, microbatches, pair)
    for stages in (2, 3, 4)
    for policy, depth, microbatches in [
        ("stash", noam, 1), ("stash", hiding, 1), ("stash", noam, 4),
        ("vertical-sync", noam, 1), ("vertical-sync", hiding, 4), ("2bw", noam, 4),
        ("pipeoptim", noam, 1), ("pipeoptim", hiding, 1), ("pipeoptim", noam, 4),
        ("spectrain", noam, 1),
    ]
    for pair in (SGD, ADAM)
    if policy != "spectrain" or pair is SGD
]  # fmt: skip
CASES += [
    ("gpt", 2, "stash", noam, 1, ADAM), ("gpt", 3, "stash", hiding, 1, SGD),
    ("gpt", 4, "2bw", noam, 4, ADAM), ("gpt", 3, "pipeoptim", noam, 1, ADAM),
    ("gpt", 4, "spectrain", noam, 1, SGD), ("gpt", 4, "vertical-sync", noam, 1, SGD),
]  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "stages", "policy", "depth", "microbatches", "pair"),
    CASES,
    ids=[f"{name}-{n}-{p}-{d.__name__}-{m}-{pair[0].name}" for name, n, p, d, m, pair in CASES],
)
def test_equals_the_reference(
    crew: Crew, name: str, stages: int, policy: str, depth: Any, microbatches: int, pair: Any
) -> None:
    """Reading the weights flushes in the middle."""
    subject, depths = SUBJECTS[name], depth(stages)
    reference = Training(
        subject, stages, pair[1], delays(policy, depths, microbatches), microbatches
    )
    with open_stream(crew, subject, stages, policy, pair[0], microbatches, depths) as pipe:
        for numbers in (FIRST, SECOND):
            losses(pipe, subject, numbers)
            reference.run([subject.batch(b) for b in numbers])
            assert distance(pipe.state_dict(), reference.last) < CLOSE


@pytest.mark.parametrize("policy", ["stash", "vertical-sync", "pipeoptim", "spectrain"])
def test_a_wrong_version_at_one_end_is_detected(crew: Crew, policy: str) -> None:
    """At the last stage the newest version that its owner has is not the right one."""
    subject = SUBJECTS["gpt"]
    rules = delays(policy, noam(3), 1)

    class Newest(Training):
        def _read(self, choice: Any, name: str, m: int) -> torch.Tensor:
            if name == "head.weight":
                return self.weights["embedding.tokens.weight"][max(0, m - 1)]
            return super()._read(choice, name, m)

    wrong = Newest(subject, 3, SGD[1], rules)
    wrong.run([subject.batch(b) for b in FIRST])
    with open_stream(crew, subject, 3, policy, SGD[0]) as pipe:
        losses(pipe, subject, FIRST)
        assert distance(pipe.state_dict(), wrong.last) > 1e-4


def test_clipped_by_stage(crew: Crew) -> None:
    """The owner's norm contains the sum of the gradients of all ends."""
    subject, rules = SUBJECTS["chain"], delays("stash", noam(3), 1)
    reference = Training(subject, 3, SGD[1], rules, clip_norm=0.05)
    reference.run([subject.batch(b) for b in FIRST])
    with open_stream(crew, subject, 3, "stash", SGD[0], clip_norm=0.05, clip_each=True) as pipe:
        losses(pipe, subject, FIRST)
        assert distance(pipe.state_dict(), reference.last) < CLOSE


@pytest.mark.parametrize("policy", ["stash", "pipeoptim"])
def test_evaluated_in_the_middle(crew: Crew, policy: str) -> None:
    """An evaluation flushes, so every end has the present weights."""
    subject = SUBJECTS["gpt"]
    reference = Training(subject, 3, ADAM[1], delays(policy, noam(3), 1))
    with open_stream(crew, subject, 3, policy, ADAM[0]) as pipe:
        for numbers in (FIRST, SECOND):
            losses(pipe, subject, numbers)
            reference.run([subject.batch(b) for b in numbers])
            model = copy.deepcopy(subject.start())
            model.load_state_dict({**model.state_dict(), **reference.last})
            model.head.weight = model.embedding.tokens.weight
            x, y = subject.batch(99)
            wanted = float(subject.loss_fn(model(x), y).detach())
            assert pipe.evaluate([(x, y)]).loss == pytest.approx(wanted, rel=1e-9)
        assert distance(pipe.state_dict(), reference.last) < CLOSE


def test_two_runs_and_a_resumed_run_are_equal(crew: Crew, tmp_path: Path) -> None:
    subject = SUBJECTS["gpt"]
    found = []
    for _ in range(2):
        with open_stream(crew, subject, 3, "pipeoptim", ADAM[0], depths=hiding(3)) as pipe:
            first = losses(pipe, subject, FIRST)
            pipe.save(tmp_path)
            found.append((first, losses(pipe, subject, SECOND), pipe.state_dict()))
    with open_stream(
        crew, subject, 3, "pipeoptim", ADAM[0], depths=hiding(3), checkpoint=tmp_path
    ) as pipe:
        found.append((found[0][0], losses(pipe, subject, SECOND), pipe.state_dict()))
    for first, second, state in found[1:]:
        assert (first, second) == found[0][:2]
        assert all(torch.equal(state[name], value) for name, value in found[0][2].items())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_gives_the_same(crew: Crew, crews: Crews, transport: str) -> None:
    states = []
    for each in (crew, crews(DEVICES, transport)):
        with open_stream(each, SUBJECTS["chain"], 3, "stash", SGD[0]) as pipe:
            losses(pipe, SUBJECTS["chain"], FIRST)
            states.append(pipe.state_dict())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_versions_are_those_of_the_owner(crew: Crew) -> None:
    subject = SUBJECTS["gpt"]
    with open_stream(crew, subject, 3, "stash", SGD[0]) as pipe:
        versions = [result.versions for result in pipe.run(subject.batch(b) for b in range(5))]
    assert versions == [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4)]


def test_replicas_between_the_ends(crew: Crew) -> None:
    """The ends have one device each; the stage between them has two replicas."""
    subject, replicas, depths = SUBJECTS["gpt"], (1, 2, 1), (4, 2, 1)

    def seen(n: int, m: int) -> tuple[int, float]:
        return max(0, m // replicas[n] - depths[n] + 1), 0

    reference = Training(subject, 3, SGD[1], (seen, seen), replicas=replicas)
    reference.run([subject.batch(b) for b in FIRST])
    members = (("m0",), ("m1", "m2"), ("m3",))
    with open_stream(crew, subject, 3, "stash", SGD[0], depths=depths, members=members) as pipe:
        losses(pipe, subject, FIRST)
        assert distance(pipe.state_dict(), reference.last) < CLOSE
    with pytest.raises(HetpipeError, match="stage 0 has 2 replicas, which take turns under piped"):
        open_stream(crew, subject, 2, "stash", SGD[0], members=(("m0", "m1"), ("m2",)))


@pytest.mark.slow
def test_an_opencl_device(crews: Crews) -> None:
    """Torch and an OpenCL device share the weight, in float32."""
    ids = [info.id for info in infos() if info.backend == "opencl"]
    if not ids:
        pytest.skip("no OpenCL device")
    subject = SUBJECTS["gpt"]
    states = []
    for devices in (("pytorch:cpu:0", ids[0]), ("pytorch:cpu:0",) * 2):
        example = subject.start().float(), subject.loss_fn, subject.batch(0)
        with pipeline(
            crews(devices), *example, "01", "pipedream", cuts=subject.cuts[2], weights="stash",
            in_flight=noam(2), optimizer=SGD[0],
        ) as pipe:  # fmt: skip
            losses(pipe, subject, FIRST)
            states.append(pipe.state_dict())
    assert distance(*states) < 1e-5
