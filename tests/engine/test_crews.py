"""Shared crews: all tests get the same crew until a test breaks it."""

from __future__ import annotations

import pytest
from crews import Crews, serves

from hetpipe.errors import WorkerError

DEVICES = ("numpy:cpu:0",)


def test_a_broken_crew_is_replaced(crews: Crews) -> None:
    first = crews(DEVICES)
    assert crews(DEVICES) is first
    with pytest.raises(WorkerError):
        first.call(["m0"], "builtins:len")  # a device has no length, so the worker fails
    second = crews(DEVICES)
    assert second is not first
    assert serves(second)


def test_the_least_recently_used_crew_is_closed_first() -> None:
    crews = Crews(most=2)
    one, two = crews(DEVICES), crews(DEVICES * 2)
    assert crews(DEVICES) is one
    three = crews(DEVICES * 3)
    assert [serves(crew) for crew in (one, two, three)] == [True, False, True]
    crews.close()
    assert not any(serves(crew) for crew in (one, two, three))
