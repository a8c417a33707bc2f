"""Placement of intermediates: tensors that are live at the same time never overlap."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hetpipe.backends.opencl.lower.arena import aligned, lives, place
from hetpipe.backends.opencl.lower.expr import Value
from hetpipe.backends.opencl.lower.launch import Kernel, Launch

ALIGNMENT = 128


def random_launches(seed: int) -> list[Launch]:
    choose = random.Random(seed)
    launches, values = [], [Value(0, (choose.randrange(1, 400),), "float32")]
    for number in range(1, 40):
        made = Value(number, (choose.choice([1, 16, 100, 100, 333]),), "float32")
        read = choose.sample(values, min(len(values), choose.randrange(1, 4)))
        inplace = frozenset(v.id for v in read if choose.random() < 0.5)
        launches.append(Launch(Kernel("", "k"), (1,), (1,), (*read, made), inplace))
        values = [*values[-6:], made]
    return launches


@pytest.mark.parametrize("seed", range(30))
def test_no_two_live_tensors_overlap(seed: int) -> None:
    launches = random_launches(seed)
    life = lives(launches)
    offsets, total = place(life, launches, ALIGNMENT)
    assert offsets.keys() == life.keys()
    for a, one in life.items():
        assert offsets[a] % ALIGNMENT == 0
        assert offsets[a] + one.nbytes <= total
        for b, other in life.items():
            apart = offsets[a] + one.nbytes <= offsets[b] or offsets[b] + other.nbytes <= offsets[a]
            if a == b or one.last < other.first or other.last < one.first or apart:
                continue
            # Two tensors may overlap only if the launch that creates one reads the other for the
            # last time, element by element.
            old, new = (a, b) if one.first < other.first else (b, a)
            assert life[old].last == life[new].first
            assert old in launches[life[new].first].inplace
            assert (offsets[a], one.nbytes) == (offsets[b], other.nbytes)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_overlaps_fixed_tensors(seed: int) -> None:
    """Keep some tensors at fixed offsets: they die at a launch, or live from one onwards."""
    choose = random.Random(seed)
    launches = random_launches(seed)
    life = lives(launches)
    first = {key: span for key, span in life.items() if choose.random() < 0.4}
    for key in list(first):
        if choose.random() < 0.3:  # a result, which outlives the launches
            life[key] = first[key] = replace(first[key], last=len(launches))
    most = choose.choice([1000, 3000, 6000])
    offsets, _ = place(first, launches, ALIGNMENT, most=most)
    fixed = {
        key: (begin, begin + aligned(life[key].nbytes, ALIGNMENT)) for key, begin in offsets.items()
    }
    rest = {key: span for key, span in life.items() if key in fixed or key not in first}
    added, total = place(rest, launches, ALIGNMENT, fixed, most)
    assert total <= most
    assert not added.keys() & fixed.keys()
    assert all(begin % ALIGNMENT == 0 for begin in added.values())
    spans = fixed | {
        key: (begin, begin + aligned(life[key].nbytes, ALIGNMENT)) for key, begin in added.items()
    }
    for (a, (low, high)), (b, (begin, end)) in itertools.combinations(spans.items(), 2):
        one, other = life[a], life[b]
        if one.last < other.first or other.last < one.first or high <= begin or end <= low:
            continue
        old, new = (a, b) if one.first < other.first else (b, a)
        assert life[old].last == life[new].first
        assert old in launches[life[new].first].inplace
        assert spans[old] == spans[new]


@pytest.mark.parametrize("is_fixed", [False, True])
def test_scratch_of_a_launch_is_apart_from_its_operands(is_fixed: bool) -> None:
    """The operand and the scratch of its last reader have the same size."""
    operand, scratch, result = (Value(i, (32,), "float32") for i in range(3))
    kernel = Kernel("", "k")
    ids = frozenset({operand.id}), frozenset({scratch.id})
    reads = Launch(kernel, (1,), None, (operand, scratch, result), *ids)
    launches = [
        Launch(kernel, (1,), None, (operand,)), reads, Launch(kernel, (1,), None, (result,))
    ]  # fmt: skip
    fixed = {operand.id: (0, 128)} if is_fixed else {}
    offsets, _ = place(lives(launches), launches, ALIGNMENT, fixed)
    offsets = {operand.id: 0, **offsets}
    assert offsets[scratch.id] not in (offsets[operand.id], offsets[result.id])
    assert offsets[result.id] == offsets[operand.id], "a result takes the operand's place"


def test_results_take_the_highest_offsets() -> None:
    values = [Value(i, (32,), "float32") for i in range(3)]
    launches = [Launch(Kernel("", "k"), (1,), None, (value,)) for value in values]
    life = {key: replace(span, last=3) for key, span in lives(launches).items()}
    assert place(life, launches, ALIGNMENT, most=300)[0] == {0: 128, 1: 0}


def test_a_chain_needs_two_tensors_of_memory_or_one_if_in_place() -> None:
    values = [Value(i, (32,), "float32") for i in range(10)]
    pairs = [(values[0],), *itertools.pairwise(values)]
    apart = [Launch(Kernel("", "k"), (1,), None, pair) for pair in pairs]
    assert place(lives(apart), apart, ALIGNMENT)[1] == 2 * 128
    over = [Launch(Kernel("", "k"), (1,), None, p, frozenset({p[0].id})) for p in pairs]
    assert place(lives(over), over, ALIGNMENT)[1] == 128
