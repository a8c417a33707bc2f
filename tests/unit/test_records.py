"""Records of files: refusals, their messages, and their places."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from hetpipe.errors import HetpipeError, PlanError
from hetpipe.plan.plan import Plan
from hetpipe.records import Count, Entries, Number, OneOf, Source, read_json
from hetpipe.words import short

PLAN = Path(__file__).parents[1] / "data" / "plan.json"


@dataclass(frozen=True)
class Part:
    """A part of a thing."""

    size: Count
    weight: Annotated[float, Number(0.0, 10.0, above=True)] = 1.0


@dataclass(frozen=True)
class Thing:
    """A record with all kinds of fields."""

    colour: Annotated[str, OneOf(("red", "blue"))]
    parts: Annotated[tuple[Part, ...], Entries(1)]
    named: dict[str, Part]


RIGHT = {"colour": "red", "parts": [{"size": 1}, {"size": 2}], "named": {"a:0": {"size": 3}}}


def changed(*place, value):
    thing = json.loads(json.dumps(RIGHT))
    holder = thing
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return thing


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (7, "the thing is 7, it should be an object"),
        ({}, "the thing lacks the key 'colour'"),
        (changed("x", value=1), "the thing has an unknown key 'x'; known: colour, parts, named"),
        (changed("colour", value="green"), "colour is 'green', it should be 'red' or 'blue'"),
        (
            changed("parts", value=[]),
            "parts is [], it should be a list of 1 or more entries, not 0",
        ),
        (changed("parts", value={}), "parts is {}, it should be a list"),
        (changed("parts", 1, value=None), "parts.1 is None, it should be an object"),
        (changed("parts", 1, "size", value=-1), "parts.1.size is -1, it should be at least 0"),
        (
            changed("parts", 1, "size", value=2.0),
            "parts.1.size is 2.0, it should be a whole number",
        ),
        (
            changed("parts", 1, "size", value=True),
            "parts.1.size is True, it should be a whole number",
        ),
        (changed("parts", 0, "weight", value=0), "parts.0.weight is 0, it should be above 0"),
        (changed("parts", 0, "weight", value=11), "parts.0.weight is 11, it should be at most 10"),
        (changed("parts", 0, "weight", value="1"), "parts.0.weight is '1', it should be a number"),
        (changed("parts", 0, "x", value=1), "parts.0 has an unknown key 'x'; known: size, weight"),
        (changed("named", "a:0", value={}), "named.a:0 lacks the key 'size'"),
        (
            changed("named", "a:0", "y", value={}),
            "named.a:0 has an unknown key 'y'; known: size, weight",
        ),
        (
            changed("parts", 0, "size", value=10**30),
            f"parts.0.size is {10**30}, it should be at most {2**63 - 1}",
        ),
        (
            changed("parts", 0, "weight", value=float("nan")),
            "parts.0.weight is nan, it should be a finite number",
        ),
    ],
)
def test_an_error_names_place_value_and_rule(thing, message):
    with pytest.raises(PlanError) as caught:
        Source("the thing", PlanError, "t.json").record(Thing, thing)
    assert str(caught.value) == f"t.json: {message}"
    with pytest.raises(PlanError) as caught:
        Source("the thing", PlanError).record(Thing, thing)
    assert str(caught.value) == (message if message.startswith("the") else f"the thing: {message}")


def test_a_written_record_must_have_all_keys():
    source = Source("the thing", PlanError)
    assert source.record(Thing, RIGHT).parts[1] == Part(2, 1.0)
    with pytest.raises(PlanError, match=r"the thing: parts\.0 lacks the key 'weight'"):
        source.versioned(Thing, RIGHT | {"version": 3}, 3)
    with pytest.raises(PlanError, match="has version True, this hetpipe reads 1"):
        source.versioned(Thing, RIGHT | {"version": True}, 1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": 1,\n "a": 2}', ": the key 'a' occurs twice in one object"),
        (b'{"a":\n NaN}', ": NaN is not JSON"),
        (b'{"a":\n 1,}', ":2: column 4 is not JSON"),
        (b'{"a":\n "\xff"}', ":2: byte 0xff is not UTF-8"),
        (b"9" * 5000, ": the number 9999999999... has 5000 digits, at most 40 are read"),
        (b"[" * 100_000, ": lists and objects are nested too deeply"),
        (None, ": cannot be read: No such file"),
    ],
)
def test_invalid_json_is_refused_with_its_place(tmp_path, raw, message):
    path = tmp_path / "x.json"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(HetpipeError) as caught:
        read_json(path, HetpipeError)
    assert str(caught.value).startswith(f"{path}{message}")


def test_values_in_messages_are_short():
    deep = 1
    for _ in range(10_000):
        deep = [deep]
    for value in (
        deep,
        "x" * 10_000,
        1 << 99_999,
        list(range(10_000)),
        {str(n): n for n in range(999)},
    ):
        assert len(short(value)) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.update(microbatches=9), "the plan: microbatches is 9, more than the 8"),
        (lambda plan: plan.update(microbatches=0), "microbatches is 0, it should be at least 1"),
        (lambda plan: plan.update(step_s=float("inf")), "step_s is inf, it should be a finite"),
        (
            lambda plan: plan["stages"][1].update(in_flight=2000),
            r"stages\.1\.in_flight is 2000, abo",
        ),
        (
            lambda plan: plan["stages"][1].update(devices=[]),
            r"stages\.1\.devices is \[\], it should",
        ),
        (
            lambda plan: plan["stages"][1].update(shares=[1.0, 2.0]),
            r"stages\.1: shares \[1\.0, 2\.0",
        ),
        (
            lambda plan: plan["stages"][1].update(shares=[-1]),
            r"stages\.1\.shares\.0 is -1, it shou",
        ),
        (
            lambda plan: plan.update(stages=[], layers=[]),
            r"layers is \[\], it should be a list of 1",
        ),
    ],
)
def test_numbers_of_a_plan_are_checked(change, message):
    plan = json.loads(PLAN.read_text())
    change(plan)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(plan)


def test_a_plan_without_prices_has_an_unknown_step():
    plan = Plan.from_json(json.loads(PLAN.read_text()) | {"step_s": 0.0})
    assert plan.samples_per_s == float("inf")
    assert "step unknown" in str(plan)
    assert "no costs" in str(plan)
    assert "measured costs" not in str(plan)


def test_the_validation_library_is_imported_with_the_first_file():
    code = (
        "import sys, hetpipe.plan.planner, hetpipe.cluster.cluster, hetpipe.simulate.timeline;"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
