"""Crews that tests share: one for all, until a test breaks it."""

from __future__ import annotations

import pytest
from crews import Crews, serves

from hetpipe.errors import WorkerError

DEVICES = ("numpy:cpu:0",)


def test_a_broken_crew_is_replaced(crews: Crews) -> None:
    first = crews(DEVICES)
    assert crews(DEVICES) is first
    with pytest.raises(WorkerError):
        first.call(["m0"], "builtins:len")  # of a device
    second = crews(DEVICES)
    assert second is not first
    assert serves(second)


def test_the_crew_that_was_not_asked_for_longest_goes_first() -> None:
    crews = Crews(most=2)
    one, two = crews(DEVICES), crews(DEVICES * 2)
    assert crews(DEVICES) is one
    three = crews(DEVICES * 3)
    assert [serves(crew) for crew in (one, two, three)] == [True, False, True]
    crews.close()
    assert not any(serves(crew) for crew in (one, two, three))
