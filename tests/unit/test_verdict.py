"""The benchmark's last lines: what to do on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.bench.show import closing


def outcome(*rates: float, label: str = "measured") -> Any:
    """Pipelines at these rates, where plain torch on all cores does 100."""
    rows = [
        SimpleNamespace(rate=rate, plan=SimpleNamespace(devices=(f"d{n}", "e")))
        for n, rate in enumerate(rates)
    ]
    balanced, twice = (*rows, None)[:2]
    balanced.label = label
    return SimpleNamespace(
        setting=SimpleNamespace(model="m"),
        balanced=balanced,
        twice=twice,
        over_all_cores=lambda row: row.rate / 100,
    )


@pytest.mark.parametrize(
    ("rates", "line"),
    [
        ((110.0,), "m: a pipeline pays: d0 + e train 1.10 times as fast as plain torch"),
        ((90.0, 125.0), "m: a pipeline pays: d1 + e train 1.25 times as fast as plain torch"),
        ((90.0, 80.0), "m: use plain torch: d0 + e as a pipeline reach 0.90 of the speed of"),
        ((98.0, 102.0), "m: it makes no difference: d1 + e as a pipeline are as fast as"),
    ],
)
def test_the_best_pipeline_decides(rates: tuple[float, ...], line: str) -> None:
    assert closing([outcome(*rates)])[0].startswith(line)


def test_emulated_devices_give_no_advice() -> None:
    assert len(closing([outcome(200.0, label="emulated")])) == 1
