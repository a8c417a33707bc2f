"""How long a copy of the stages' values takes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.crew import copies
from hetpipe.crew.copies import Copies
from hetpipe.wire.copy_messages import Copied


@pytest.mark.parametrize(
    ("took_s", "typical_s"),
    [
        ([], 0.0),
        ([0.5], 0.5),
        ([0.5, 0.4], 0.4),
        ([0.5, 0.4, 0.1], 0.4),
        ([0.5, 0.4, 0.1, 0.1], 0.1),
        ([0.1, 0.1, 9.0], 0.1),
    ],
    ids=["none", "first", "second", "third", "fourth", "outlier"],
)
def test_a_slow_copy_is_not_typical(
    took_s: Sequence[float], typical_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow copy would let many mini-batches pass until the next one."""
    now_s, kept, key = 0.0, Copies(), ("param", "w")
    monkeypatch.setattr(copies, "time", SimpleNamespace(monotonic=lambda: now_s))
    values: Any = {key: None}
    for number, each_s in enumerate(took_s, 1):
        kept.begin(number, [key], {}, None)
        now_s += each_s
        kept.arrived(Copied(number, values))
    assert kept.typical_s == pytest.approx(typical_s)
