"""How long a copy of the stages' values takes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetpipe.crew import copies
from hetpipe.crew.copies import Copies, Memory
from hetpipe.wire.copy_messages import Copied, Stored


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


@pytest.mark.parametrize("loadings", [1, 2])
def test_the_first_copies_into_lent_memory_are_not_typical(
    loadings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, kept, key = 0.0, Copies(), ("param", "w")
    monkeypatch.setattr(copies, "time", SimpleNamespace(monotonic=lambda: now_s))
    number = 0
    for loading in range(loadings):
        for took_s in (9.0, 9.0, 0.5):
            number += 1
            memory = kept.memories.next(0, loading, lambda n=number: Memory(n, mmap.mmap(-1, 8)))
            assert memory is not None
            kept.begin(number, [key], {key: np.frombuffer(memory.content, np.uint8)}, None)
            now_s += took_s
            kept.arrived(Stored(number, [key]))
    assert kept.typical_s == pytest.approx(0.5)
