"""The benchmark's rows.

Long steps get few repetitions, so that a run ends in reasonable time. All rows have the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from hetpipe.bench.rows import AtOnceRow, Pace


def test_short_steps_get_more_repetitions_than_long_ones() -> None:
    assert Pace.of(0.01) == Pace(warm_up=3, timed=4, checked=20)
    assert Pace.of(0.25) == Pace(warm_up=2, timed=3, checked=6)
    assert Pace.of(60.0) == Pace(warm_up=1, timed=1, checked=4)
    assert Pace.of(60.0, timed=7).timed == 7, "as asked for"


def test_devices_at_once_train_on_the_mini_batches_of_the_seed() -> None:
    def batches(samples: int, seed: int) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.full((samples,), number), seed) for number in count())

    seen: list[tuple[torch.Tensor, int]] = []
    pipe = SimpleNamespace(step=lambda x, y: seen.append((x, y)))
    alone: Any = [
        SimpleNamespace(
            pipe=pipe, label="measured", microbatches=1, plan=SimpleNamespace(step_s=1e-6)
        )
    ]
    task: Any = SimpleNamespace(
        workload=SimpleNamespace(batches=batches), mini_batch=3, seed=17, pace=Pace(warm_up=2)
    )
    AtOnceRow(task, alone).step_s()
    assert [(x.tolist(), seed) for x, seed in seen[:2]] == [([0, 0, 0], 17), ([1, 1, 1], 17)]
