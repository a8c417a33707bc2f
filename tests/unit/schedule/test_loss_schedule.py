"""GPipe with a loss over whole mini-batches: the last stage waits after its forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import GPIPE, GPIPE_WITH_LOSS
from hetpipe.schedule.validate import validate
from hetpipe.simulate import simulator
from hetpipe.simulate.outcome import occupation
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer
from hetpipe.simulate.walk import order_of, step_s


def rows(stages: int, microbatches: int) -> list[list[str]]:
    schedule = generate(GPIPE_WITH_LOSS, stages, microbatches)
    return [[str(action) for action in row] for row in schedule]


def test_only_the_last_stage_waits() -> None:
    assert rows(1, 2) == [["0F0", "0F1", "0L", "0B0", "0B1", "0U"]]
    first, last = rows(2, 1)
    assert "0L" not in first
    assert last == ["1RF0", "1F0", "1L", "1B0", "1SB0", "1U"]
    assert Action.parse("1L") == Action(1, Op.LOSS)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("replicas", [(), (1, 2)])
def test_the_wait_makes_a_step_longer_and_computes_nothing(
    stages: int, replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick walk, the clock and the sum of the parts agree."""
    replicas = replicas[:stages] or (1,) * stages
    replicas += (1,) * (stages - len(replicas))
    links = tuple(Transfer(0.5, 0.25) for _ in range(stages - 1))
    times = StageTimes((1.0,) * stages, (2.0,) * stages, (0.5,) * stages, links, links, loss_s=3.0)
    usual = simulate(generate(GPIPE, stages, 4, replicas=replicas), times)
    schedule = generate(GPIPE_WITH_LOSS, stages, 4, replicas=replicas)
    quick = simulate(schedule, times)
    assert quick.step_s == usual.step_s + 3.0
    assert sum(quick.busy_s()) == sum(usual.busy_s())
    monkeypatch.setattr(simulator, "walk", lambda *_: None)
    by_clock = simulate(schedule, times)
    assert sorted(by_clock.spans) == sorted(quick.spans)
    assert sum(by_clock.busy_s()) == sum(usual.busy_s())
    order = order_of(GPIPE_WITH_LOSS, stages, 4, (4,) * stages, stages)
    assert order is not None
    assert step_s(order, times) == quick.step_s
    assert occupation(quick).engine == pytest.approx(occupation(usual).engine, abs=1e-12)


def test_a_loss_at_a_wrong_place_is_refused() -> None:
    (row,) = generate(GPIPE_WITH_LOSS, 1, 2)
    forward, second, loss, backward, *rest = row
    for wrong, text in (
        ((forward, loss, second, backward, *rest), "0L comes before 0F1"),
        ((forward, second, backward, loss, *rest), "0B0 comes before 0L"),
        ((*row[:3], loss, *row[3:]), "0L occurs twice"),
        ((*row, replace(loss, number=1)), "0B0 comes before 0L1"),
    ):
        with pytest.raises(ScheduleError, match=text):
            validate((wrong,), 2)
