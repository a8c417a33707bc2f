"""torch's operator database on every backend: all results are right, and all refusals are listed.

`database.toml` beside this file lists, for one version of torch, the entries that cannot be tested
(results that are random, complex or not initialised, or that torch cannot trace) and the entries
that each backend refuses. All other entries run: the largest of an entry's first samples, in
float32, forward and with gradients if torch has them, against float64. The list may only shrink: an
entry that runs must be removed, and no refused entry may be added. docs/operators.md is made from
the list.
"""

from __future__ import annotations

import functools
from pathlib import Path
from zlib import crc32

import pytest
from benchmarks import survey
from found_devices import infos

from hetpipe.conformance.check import BrokenRule, NotAsked
from hetpipe.conformance.database import check_entry, entries
from hetpipe.conformance.rig import Rig
from hetpipe.conformance.run import rig_of

DATA = Path(__file__).with_name("database.toml")
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
SURVEY = survey.read(DATA)
MOST = {"numpy": 115, "opencl": 106, "pytorch": 8}
"""Longest allowed list of each backend. Lower it when a list becomes shorter."""
FIRST = ("numpy:cpu:0", "pytorch:cpu:0", "opencl:pocl:0")
SLOW = "opencl:oclgrind:0"
"""An interpreter, for which only the smaller cases of the kernel tests are fast enough."""
HERE = [info.id for info in infos() if info.backend in MOST]
OTHERS = [each for each in HERE if each not in (*FIRST, SLOW)]
rig_on = functools.cache(rig_of)
PARTS = 64
"""Number of parts of the database; each part is one case, since the import takes seconds."""

pytestmark = [
    pytest.mark.skipif(
        survey.version() != SURVEY.torch, reason=f"the list is that of torch {SURVEY.torch}"
    ),
    pytest.mark.filterwarnings("ignore"),  # some samples are odd on purpose
]


def faults(rig: Rig, part: int) -> list[str]:
    """Return one line per entry of this part with a wrong result or an unlisted status."""
    lines = []
    for name in entries():
        if crc32(name.encode()) % PARTS != part:
            continue
        try:
            status = status_of(rig, name)
        except BrokenRule as broken:
            lines.append(f"{name} is wrong: {broken}")
            continue
        listed = SURVEY.status(rig.info.backend, name)
        if listed and not status:
            lines.append(f"{name} runs: take it out of {DATA.name}, which lists {listed!r}")
        elif status and not listed:
            lines.append(f"{name} does not run any more: {status}")
    return lines


def status_of(rig: Rig, name: str) -> str:
    """Return why a device does not run an entry, or an empty string if it does."""
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
    """Other runtimes each test some parts:

    their kernels are the same, and only the compiler differs.
    """
    if not OTHERS:
        pytest.skip("no other runtime is here")
    lines = faults(rig_on(OTHERS[part // 4 % len(OTHERS)]), part)
    assert not lines, "\n".join(lines)


def test_the_lists_only_shrink() -> None:
    """A list that becomes shorter lowers its number in `MOST`, so it cannot grow again."""
    assert {backend: len(names) for backend, names in SURVEY.refused.items()} == MOST


def test_listed_entries_exist() -> None:
    listed = SURVEY.unasked.keys() | {name for names in SURVEY.refused.values() for name in names}
    assert sorted(listed - entries().keys()) == []


def test_the_page_of_operators_is_made_from_the_list() -> None:
    command = "python -m benchmarks.survey tests/backend/database.toml docs/operators.md"
    assert PAGE.read_text(encoding="utf-8") == survey.page(SURVEY), f"PYTHONPATH=tests {command}"
