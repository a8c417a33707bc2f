"""The benchmark's last lines: advice for this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.bench.show import closing


def outcome(*rates: float, label: str = "measured", stages: int = 2) -> Any:
    """Return an outcome with these rates, where plain torch on all cores reaches 100."""
    rows = []
    for n, rate in enumerate(rates):
        devices = [(f"d{n}",), ("e",)] if stages == 2 else [(f"d{n}", "e")]
        plan = SimpleNamespace(stages=[SimpleNamespace(devices=names) for names in devices])
        rows.append(SimpleNamespace(rate=rate, plan=plan, label=label))
    return SimpleNamespace(
        setting=SimpleNamespace(model="m"),
        balanced=rows[0],
        together=rows[:1],
        twins=rows[1:],
        over_all_cores=lambda row: row.rate / 100,
    )


@pytest.mark.parametrize(
    ("rates", "line"),
    [
        ((110.0,), "m: a pipeline pays: d0 + e as a pipeline train 1.10 times as fast as plain"),
        ((90.0, 125.0), "m: a pipeline pays: d1 + e as a pipeline train 1.25 times as fast as"),
        ((90.0, 80.0), "m: use plain torch: d0 + e as a pipeline reach 0.90 of the speed of"),
        ((98.0, 102.0), "m: it makes no difference: d1 + e as a pipeline are as fast as"),
    ],
)
def test_the_best_pipeline_decides(rates: tuple[float, ...], line: str) -> None:
    assert closing([outcome(*rates)])[0].startswith(line)


def test_the_advice_distinguishes_replicas_from_a_pipeline() -> None:
    line = closing([outcome(120.0, stages=1)])[0]
    assert line.startswith("m: data parallelism pays: d0 + e each with the whole model train 1.20")


def test_emulated_devices_give_no_advice() -> None:
    assert len(closing([outcome(200.0, label="emulated")])) == 1
