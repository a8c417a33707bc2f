"""Pipelines of a hand-made linear model equal plain numpy on every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crews import ALIKE, MIXED, TRANSPORTS, Crews
from engine_stages import LR, WIDTH, Reference, make_stages, make_values

from hetpipe.capture.program import GRAD, PARAM, STATE
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, StepResult
from hetpipe.errors import HetpipeError
from hetpipe.schedule.generators import generate

SIZES = (3, 3, 2)


def batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(sum(SIZES), WIDTH)), rng.normal(size=(sum(SIZES), WIDTH))


def run(crew: Crew, schedule: Any, number: int, grad_scale: float | None = None) -> StepResult:
    x, y = batch(number)
    ends = np.cumsum(SIZES)[:-1]
    feeds = [{"x": a, "y": b} for a, b in zip(np.split(x, ends), np.split(y, ends), strict=True)]
    tangents = (1.0,) * len(SIZES)
    rates = {"lr": LR}
    return crew.step(StepRequest(schedule, SIZES, feeds, tangents, rates, number, 0, grad_scale))


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
def test_equals_plain_training(crews: Crews, transport: str, backend: str) -> None:
    """One crew trains two and three stages, with a skip and tied weights, in GPipe and 1F1B."""
    crew = crews(ALIKE if backend == "numpy" else ("pytorch:cpu:0",) * 3, transport)
    members = list(crew.infos)[:3]
    assert [crew.infos[member].backend for member in members] == [backend] * 3
    for stages, skip, tied, name in [
        (2, False, False, "gpipe"),
        (2, False, True, "1f1b"),
        (3, True, False, "1f1b"),
        (3, True, True, "gpipe"),
    ]:
        graphs = make_stages(stages, sorted(set(SIZES)), skip=skip, tied=tied)
        crew.load(graphs, members[:stages], make_values(stages, tied))
        ties = [(0, (stages - 1,))] if tied else []
        schedule = generate(name, stages, len(SIZES), tied=ties)
        reference = Reference(stages, skip, tied)
        for number in (1, 2, 3):
            result = run(crew, schedule, number)
            wanted = reference.step(*batch(number))
            assert result.counts is not None
            close(sum(result.losses) / sum(result.counts), wanted)
        for key, value in crew.read(PARAM).items():
            close(value, reference.weights[key])
        for key, value in crew.read(STATE).items():
            close(value, reference.momentum[key.partition("/")[2]])
        assert not any(value.any() for value in crew.read(GRAD).values())


def test_mixed_backends(crews: Crews) -> None:
    crew = crews(MIXED, "shared-memory")
    crew.load(make_stages(2, [2, 3]), ["m2", "m1"], make_values(2))
    reference = Reference(2)
    result = run(crew, generate("1f1b", 2, 3), 1)
    close(sum(result.losses) / (sum(SIZES) * WIDTH), reference.step(*batch(1)))
    close(crew.read(PARAM)["w1"], reference.weights["w1"])
    assert result.timeline.workers == ("m2", "m1")


def test_write_restores_the_values_of_read(crew: Crew) -> None:
    crew.load(make_stages(2, [2, 3], tied=True), ["m0", "m1"], make_values(2, True))
    schedule = generate("gpipe", 2, 3, tied=[(0, (1,))])
    run(crew, schedule, 1)
    kept = {role: crew.read(role) for role in (PARAM, STATE)}
    first = run(crew, schedule, 2).losses
    assert run(crew, schedule, 2).losses != first
    for role, values in kept.items():
        crew.write(role, values)
    assert run(crew, schedule, 2).losses == first


def test_tied_gradient_is_written_once(crew: Crew) -> None:
    crew.load(make_stages(2, [2, 3], tied=True), ["m0", "m1"], make_values(2, True))
    schedule = generate("gpipe", 2, 3, tied=[(0, (1,))])
    reference = Reference(2, tied=True)
    _, grads = reference.gradients(*batch(1))
    crew.write(GRAD, {"w0": -grads["w0"]})
    run(crew, schedule, 1)  # the gradients cancel
    close(crew.read(PARAM)["w0"], reference.weights["w0"])


def test_given_scale_replaces_the_counts(crew: Crew) -> None:
    crew.load(make_stages(2, [2, 3]), ["m0", "m1"], make_values(2))
    run(crew, generate("1f1b", 2, 3), 1, grad_scale=0.0)
    for name, value in make_values(2).items():
        close(crew.read(PARAM, [name])[name], value)


def test_timeline_has_every_pass_in_order(crews: Crews) -> None:
    crew = crews(ALIKE, "shared-memory")
    crew.load(make_stages(2, [2, 3]), ["m0", "m1"], make_values(2))
    schedule = generate("1f1b", 2, 3)
    spans = run(crew, schedule, 1).timeline.spans
    assert {str(span.action) for span in spans} == {
        str(action) for worker in schedule for action in worker
    }
    at = {str(span.action): span for span in spans}
    for m in range(3):
        assert 0.0 <= at[f"0F{m}"].end_s <= at[f"0SF{m}"].start_s
        assert at[f"0SF{m}"].start_s <= at[f"1RF{m}"].end_s <= at[f"1F{m}"].start_s
        assert at[f"1B{m}"].end_s <= at[f"0B{m}"].start_s


def test_invalid_requests_are_refused_before_they_run() -> None:
    fresh = Cluster((Member("m0", ALIKE[0]), Member("m1", ALIKE[1])), transport="local")
    with Crew.start(fresh) as crew:
        with pytest.raises(HetpipeError, match="no stages are loaded"):
            run(crew, generate("gpipe", 2, 3), 1)
        with pytest.raises(
            HetpipeError, match=r"one member per replica: \[1, 1\] members, not \['m0'\]"
        ):
            crew.load(make_stages(2, [2, 3]), ["m0"], make_values(2))
        with pytest.raises(HetpipeError, match="needs param 'w1'"):
            crew.load(make_stages(2, [2, 3]), ["m0", "m1"], {"w0": make_values(1)["w0"]})
        crew.load(make_stages(2, [2, 3]), ["m0", "m1"], make_values(2))
        with pytest.raises(HetpipeError, match="for 3 workers, but the stages are loaded on 2"):
            run(crew, generate("gpipe", 3, 3), 1)
        feed = {"x": np.zeros((3, WIDTH), np.float32), "y": np.zeros((3, WIDTH))}
        one = generate("gpipe", 2, 1)
        with pytest.raises(HetpipeError, match=r"float64\[3, 4\].*float32\[3, 4\]"):
            crew.step(StepRequest(one, (3,), [feed], (1.0,), {"lr": LR}, 1))
        with pytest.raises(HetpipeError, match=r"has 5 samples .* programs for 2, 3"):
            crew.step(StepRequest(one, (5,), [feed], (1.0,), {"lr": LR}, 1))
        with pytest.raises(HetpipeError, match="no param 'w9'"):
            crew.read(PARAM, ["w9"])
        run(crew, generate("gpipe", 2, 3), 1)  # the refused requests did not harm the crew
