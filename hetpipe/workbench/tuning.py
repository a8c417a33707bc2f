"""Values of a kernel's macros: which are right on a device, and which is the fastest."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from hetpipe.child import Child, ChildError
from hetpipe.errors import BackendError
from hetpipe.files import write_beside
from hetpipe.records import read_text
from hetpipe.sdk.formats.kernelspec import KernelSpec
from hetpipe.sdk.host.references import backend_reference
from hetpipe.toml import parse_toml
from hetpipe.words import near, words
from hetpipe.workbench.trial import Trial, outcomes

MOST_COMBINATIONS = 200
LIMIT_S = 600.0
Values = Mapping[str, int]


@dataclass(frozen=True)
class Combination:
    """A value for each macro; the seconds of a launch in each round, or why it is excluded."""

    values: Values
    rounds_s: tuple[float, ...] = ()
    excluded: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def median_s(self) -> float:
        return median(self.rounds_s)

    def is_faster(self, other: Combination) -> bool:
        """Whether every round was faster than all rounds of the other combination."""
        return max(self.rounds_s) < min(other.rounds_s)


def with_grid(trial: Trial, texts: Sequence[str]) -> Trial:
    """Return the trial with the values in texts like `TILE=8,16` instead of those in `[define]`.

    Raises `BackendError` for values that cannot be tried.
    """
    grid = {**trial.spec.define, **dict(map(_parsed, texts))}
    if len(names := [text.partition("=")[0].strip() for text in texts]) > len(set(names)):
        raise BackendError(f"--grid names a macro twice: {words(names)}; give each macro once")
    if not grid:
        raise BackendError(
            "there is nothing to tune: give values of a macro, --grid TILE=8,16, or write them "
            f"into {trial.spec_path}: [define] TILE = [8, 16]"
        )
    count = math.prod(map(len, grid.values()))
    if count > MOST_COMBINATIONS:
        sizes = " * ".join(str(len(each)) for each in grid.values())
        raise BackendError(
            f"the grid has {sizes} = {count} combinations, at most {MOST_COMBINATIONS} are tried: "
            "give fewer values"
        )
    _check_source(trial.source, grid)
    try:
        return replace(trial, spec=replace(trial.spec, define=grid))
    except BackendError as error:
        raise BackendError(f"{trial.spec_path}: {error}") from error


def _parsed(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, values = (part.strip() for part in text.partition("="))
    parts = [part.strip() for part in values.split(",")]
    if not equals or not name.isidentifier() or not all(part.isdecimal() for part in parts):
        raise BackendError(
            f"--grid {text!r}: write NAME=VALUES with whole numbers, such as --grid TILE=8,16"
        )
    if max(numbers := [int(part) for part in parts]) >= 2**31:
        raise BackendError(f"--grid {text!r}: {max(numbers)} is no int of OpenCL")
    return name, tuple(dict.fromkeys(numbers))


def _check_source(path: Path, grid: Mapping[str, object]) -> None:
    """Raise `BackendError` if a macro has no effect on the source."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", " ", read_text(path, BackendError), flags=re.DOTALL)
    known = dict.fromkeys(re.findall(r"\b[A-Z][A-Z0-9_]*\b", source))
    for name in grid:
        if not re.search(rf"\b{name}\b", source):
            raise BackendError(
                f"{path} does not use the macro {name}, so its values make no difference; "
                f"{near(name, known)}use it in the source, or leave it out"
            )
        fixed = re.search(rf"^[ \t]*#[ \t]*define[ \t]+{name}\b", source, re.M)
        if fixed and not re.search(rf"#[ \t]*ifndef[ \t]+{name}\b", source[: fixed.start()]):
            raise BackendError(
                f"{path} defines {name} itself, which replaces each value of the grid: write "
                f"#ifndef {name} before the line, and #endif after it"
            )


def combinations(spec: KernelSpec) -> list[Values]:
    """Return every combination of the macros' values, in the order of the cases."""
    return [
        dict(zip(spec.define, chosen, strict=True)) for chosen in product(*spec.define.values())
    ]


def largest_case(spec: KernelSpec) -> int:
    """Return the number of the case with the most elements in all tensors."""

    def elements(number: int) -> int:
        shapes = [each.shape for each in spec.argument.values() if each.shape is not None]
        sizes = spec.cases[number]
        return sum(math.prod(size.value(sizes) for size in shape) for shape in shapes)

    return max(range(len(spec.case)), key=elements)


def reason_against(trial: Trial, device_id: str, number: int) -> str:
    """Return why combination `number` cannot be used on a device; empty if all cases are right."""
    count = len(trial.spec.case)
    cases = range(number * count, (number + 1) * count)
    try:
        for outcome in outcomes(trial, [device_id], cases):
            if outcome.flaws:
                flaw = outcome.flaws[0]
                return f"{flaw.kind}: {flaw.text.splitlines()[0]}"
            if outcome.skipped:
                return outcome.skipped
    except BackendError as error:
        return str(error)
    return ""


def measured(
    trial: Trial, device_id: str, right: Sequence[int], case: int, seconds: float, rounds: int
) -> list[tuple[float, ...]]:
    """Return the seconds of a launch of each combination in `right`, for each round.

    The combinations take turns in one process. Raises `BackendError` if the process ends early.
    """
    request = {
        "reference": backend_reference(device_id.partition(":")[0]), "device": device_id,
        "source": str(trial.source), "spec": str(trial.spec_path), "function": trial.function,
        "seed": trial.seed, "define": trial.spec.define, "seconds": seconds, "rounds": rounds,
        "numbers": [number * len(trial.spec.case) + case for number in right],
    }  # fmt: skip
    try:
        with Child("hetpipe.workbench.timing", json.dumps(request)) as child:
            table = child.receive(LIMIT_S)["result"]
    except ChildError as error:
        raise BackendError(f"{device_id}: {error}") from error
    return [tuple(column) for column in zip(*table, strict=True)]


def keep(path: Path, best: Values) -> str:
    """Write the best values into the table `[define]` of a specification, as the first ones.

    Comments stay. Return the lines that the user has to write; empty if the file has them now.
    """
    text = read_text(path, BackendError)
    data = parse_toml(text, path, BackendError)
    before = data.pop("define", {})
    lists = {
        name: [value, *(other for other in before.get(name, ()) if other != value)]
        for name, value in best.items()
    }
    lines = {name: f"{name} = {values}" for name, values in lists.items()}
    changed = _changed(text, lines)
    try:
        after = parse_toml(changed, path, BackendError)
    except BackendError:
        after = {}
    if after.pop("define", {}) != {**before, **lists} or after != data:
        return "\n".join(["[define]", *lines.values()])
    write_beside(path, changed)
    return ""


def _changed(text: str, lines: Mapping[str, str]) -> str:
    """Return a TOML text with other lines in `[define]`; the parts that it lacks are added."""
    left, changed, table = dict(lines), list[str](), ""
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            table = line.partition("#")[0].strip()
        found = _LIST.fullmatch(line) if table == "[define]" else None
        kept = line if found is None or found[1] not in left else left.pop(found[1]) + found[2]
        changed.append(kept)
    if left and "[define]" in changed:
        changed[(at := changed.index("[define]") + 1) : at] = left.values()
    elif left:
        changed += ["", "[define]", *left.values()]
    return "\n".join(changed) + "\n"


_LIST = re.compile(r"\s*(\w+)\s*=\s*\[[\d\s,]*\](\s*(?:#.*)?)")
"""A line with a list of numbers: its name, and its comment."""
