"""torch's own operator database on every backend: nothing is wrong, and what is refused is known.

`database.toml` beside this file lists, for one version of torch, the entries that nobody can be
asked to run (results that are random, complex or not initialised, or that torch cannot trace) and
those that each backend refuses. All others run: the largest of an entry's first samples, in
float32, forward and with gradients where torch has them, against float64. The list may only shrink:
an entry that runs has to leave it, and one that is refused is not to be put into it.
docs/operators.md is made of it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from zlib import crc32

import pytest
from benchmarks import survey
from found_devices import infos

from hetpipe.conformance.database import check_entry
from hetpipe.conformance.outcomes import BrokenRule, NotAsked
from hetpipe.conformance.rig import Rig
from hetpipe.conformance.run import rig_of
from hetpipe.conformance.samples import entries

DATA = Path(__file__).with_name("database.toml")
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
SURVEY = survey.read(DATA)
MOST = {"numpy": 115, "opencl": 106, "pytorch": 8}
"""The longest that the list of a backend may be. Lower it when the list has become shorter."""
FIRST = ("numpy:cpu:0", "pytorch:cpu:0", "opencl:pocl:0")
SLOW = "opencl:oclgrind:0"
"""An interpreter, for which the kernels' own cases are small enough."""
HERE = [info.id for info in infos() if info.backend in MOST]
OTHERS = [each for each in HERE if each not in (*FIRST, SLOW)]
rig_on = functools.cache(rig_of)
PARTS = 64
"""The database is divided into so many cases, since its import takes seconds."""

pytestmark = [
    pytest.mark.skipif(
        survey.version() != SURVEY.torch, reason=f"the list is that of torch {SURVEY.torch}"
    ),
    pytest.mark.filterwarnings("ignore"),  # of samples that are odd on purpose
]


def faults(rig: Rig, part: int) -> list[str]:
    """What is wrong with a part of the database on a device, a line for each entry."""
    lines = []
    for name in entries():
        if crc32(name.encode()) % PARTS != part:
            continue
        try:
            status = seen(rig, name)
        except BrokenRule as broken:
            lines.append(f"{name} is wrong: {broken}")
            continue
        listed = SURVEY.status(rig.info.backend, name)
        if listed and not status:
            lines.append(f"{name} runs: take it out of {DATA.name}, which lists {listed!r}")
        elif status and not listed:
            lines.append(f"{name} does not run any more: {status}")
    return lines


def seen(rig: Rig, name: str) -> str:
    """Why a device does not run an entry; empty if it does."""
    try:
        check_entry(name, rig, samples=1)
    except NotAsked as reason:
        return str(reason)
    return ""


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("device_id", [each for each in FIRST if each in HERE])
def test_the_database(device_id: str, part: int) -> None:
    lines = faults(rig_on(device_id), part)
    assert not lines, "\n".join(lines)


@pytest.mark.wide
@pytest.mark.parametrize("part", range(0, PARTS, 4))
def test_a_part_of_the_database_on_another_runtime(part: int) -> None:
    """The others in turn: their kernels are the same, and only the compiler differs."""
    if not OTHERS:
        pytest.skip("no other runtime is here")
    lines = faults(rig_on(OTHERS[part // 4 % len(OTHERS)]), part)
    assert not lines, "\n".join(lines)


def test_the_lists_only_shrink() -> None:
    """A list that has become shorter lowers its number in `MOST`, so that it stays so."""
    assert {backend: len(names) for backend, names in SURVEY.refused.items()} == MOST


def test_listed_entries_exist() -> None:
    listed = SURVEY.unasked.keys() | {name for names in SURVEY.refused.values() for name in names}
    assert sorted(listed - entries().keys()) == []


def test_the_page_of_operators_is_that_of_the_list() -> None:
    command = (
        "PYTHONPATH=tests python -m benchmarks.survey tests/backend/database.toml docs/operators.md"
    )
    assert PAGE.read_text(encoding="utf-8") == survey.page(SURVEY), f"PYTHONPATH=tests {command}"
