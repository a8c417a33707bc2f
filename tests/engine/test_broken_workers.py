"""A training has an undisturbed one's results if workers break at any moment; see also
`break_workers.py`."""

from __future__ import annotations

import random
from itertools import product

import pytest
from broken_cases import CASES, NO_BREAK, Break, problems, run, undisturbed

DRAWS = 2


def drawn(name: str, kind: str, number: int) -> Break:
    """Return a break of a random worker at a random moment."""
    chance = random.Random(f"{name} {kind} {number}")
    member = chance.choice(CASES[name].used)
    return Break(member, kind, chance.randrange(len(undisturbed(name).moments[member])))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [*product(CASES, ("kill", "raise"), range(DRAWS)), *product(CASES, ["stop"], [0])],
)
def test_a_training_survives_a_loss(name: str, kind: str, number: int) -> None:
    breaks = [drawn(name, kind, number)]
    assert not problems(name, run(CASES[name], breaks), breaks)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "number"),
    product([name for name, case in CASES.items() if case.can_lose_two], range(DRAWS)),
)
def test_a_training_survives_a_loss_during_a_recovery(name: str, number: int) -> None:
    first, chance = drawn(name, "kill", number), random.Random(number)
    moments = run(CASES[name], [first]).moments
    member = chance.choice([*moments])
    breaks = [first, Break(member, "kill", chance.randrange(-5, max(len(moments[member]), 1)))]
    assert not problems(name, run(CASES[name], breaks), breaks)


def test_a_training_on_one_device_continues_data_parallelism() -> None:
    breaks = [Break("m1", "kill", 20)]
    found = run(CASES["data-parallel"], breaks)
    assert not problems("data-parallel", found, breaks)
    assert found.lost[0].plan.all_devices == ("m0",)


@pytest.mark.parametrize("name", ["accumulated-long", "accumulated-flush"])
def test_a_replay_updates_after_the_same_mini_batches(name: str) -> None:
    breaks = [Break("m1", "kill", len(undisturbed(name).moments["m1"]) - 1)]
    found = run(CASES[name], breaks)
    assert not problems(name, found, breaks)
    assert found.lost[0].replayed == found.lost[0].step


@pytest.mark.parametrize("name", ["moved", "moved-tied", "moved-stream", "rebalanced"])
def test_layers_move_in_the_cases_with_moves(name: str) -> None:
    assert undisturbed(name).moments["m1"].count("load") > 1


def test_a_member_is_lost_again_after_each_return() -> None:
    breaks = [
        Break("m1", "kill", 30), NO_BREAK, Break("m1", "kill", 20), NO_BREAK,
        Break("m1", "raise", 15),
    ]  # fmt: skip
    found = run(CASES["returned"], breaks)
    assert not problems("returned", found, breaks)
    assert [event.members for event in found.joined] == [("m1",)] * 3
    assert found.joined[-1].plan.all_devices == ("m0", "m1", "m2")
