"""The process of a trial runs many cases, and may crash between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.child import ChildEnded, ChildLate
from hetpipe.workbench import trial

FOUR, SIX, SEVEN = ({"case": number, "flaws": (), "ulp": {}} for number in (4, 6, 7))
CRASH, END = ChildEnded("kernels", -11, ""), ChildEnded("kernels", 0, "")
LATE = ChildLate("kernels is late")


class FakeChild:
    """A child that sends the messages of one run per process, and then crashes or ends."""

    is_alive = False

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = iter(messages)

    def fork(self, *arguments: Any, environment: Any) -> None:
        pass

    def receive(self, limit_s: float) -> Any:
        message = next(self._messages)
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("processes", "flaws"),
    [
        ([[FOUR, CRASH], [SEVEN, END]], [[], ["crashes"], []]),
        ([[FOUR, END], [SEVEN, END]], [[], ["crashes"], []]),
        ([[CRASH], [SIX, SEVEN, END]], [["crashes"], [], []]),
        ([[FOUR, LATE]], [[], ["hangs"]]),
        ([[FOUR, SIX, SEVEN, CRASH]], [[], [], [], ["crashes"]]),
    ],
)
def test_a_fault_belongs_to_the_case_without_an_outcome(
    processes: list[list[Any]], flaws: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    children = map(FakeChild, processes)
    monkeypatch.setattr(trial, "_idle_child", lambda: next(children))
    monkeypatch.setattr(trial, "backend_reference", lambda name: name)
    spec = SimpleNamespace(cases=[{}] * 8, time_limit_s=1, define={})
    kernel: Any = SimpleNamespace(spec=spec, source="", spec_path="", function="f", seed=0)
    found = list(trial._run(kernel, "opencl:pocl:0", [4, 6, 7], {}))
    assert [outcome.case for outcome in found] == [4, 6, 7, 7][: len(flaws)]
    assert [[flaw.kind for flaw in outcome.flaws] for outcome in found] == flaws
    assert next(children, None) is None
