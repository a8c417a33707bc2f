"""Crews for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crews import ALIKE, Crews

from hetpipe.crew.crew import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """`crews(devices, transport)` is a started crew that tests share."""
    started = Crews()
    yield started
    started.close()


@pytest.fixture
def crew(request: pytest.FixtureRequest, crews: Crews) -> Crew:
    """A shared crew of threads, on the `DEVICES` of the test's file; m0 to m3 on numpy if it names
    none."""
    return crews(getattr(request.module, "DEVICES", ALIKE))
