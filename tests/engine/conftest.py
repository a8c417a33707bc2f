"""Crews for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from crews import ALIKE, Crews
from priced import PROBE, Speeds, table_of

from hetpipe.crew.crew import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """Return the function `crews(devices, transport)`, whose started crews all tests share."""
    started = Crews()
    yield started
    started.close()


@pytest.fixture
def crew(request: pytest.FixtureRequest, crews: Crews) -> Crew:
    """A shared crew of threads on the `DEVICES` of the test file, by default m0 to m3 on numpy."""
    return crews(getattr(request.module, "DEVICES", ALIKE))


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measured profile by invented costs."""

    def profile(captured: Any, crew: Any, optimizer: Any, samples: Any, **how: Any) -> Any:
        layers = [layer.name for layer in captured.layer_graph(12).layers]
        near = (0, 1) if "near.bias" in captured.parameters else ()
        short = {} if "first.bias" in captured.parameters else {"layer_s": 1e-3}
        members = list(crew.infos)
        return {
            size: table_of(layers, members, size, tied=near, probe=PROBE, **short)
            for size in samples
        }

    monkeypatch.setattr("hetpipe.pipeline.planning.profile", profile)


@pytest.fixture
def speeds(priced: None, monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """By member, the ratio of measured to predicted pass durations that a test sets; default 1."""
    told: Speeds = {}

    def ratios_of(timelines: Any, plan: Any, table: Any) -> dict[str, list[float]]:
        return {device: [told.get(device, 1.0) for _ in timelines] for device in plan.devices}

    monkeypatch.setattr("hetpipe.pipeline.learning.ratios_of", ratios_of)
    return told
