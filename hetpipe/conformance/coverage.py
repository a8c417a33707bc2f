"""Results of checks: the coverage matrix, advice for the author, and JUnit XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.conformance.run import Result
from hetpipe.files import write_beside

_REFUSED = re.compile(r"([a-z_0-9]+(?:\.[A-Za-z_0-9]+)+) \(")


@dataclass(frozen=True)
class Family:
    """A row of the matrix: the operator cases of one kind, forward or with gradients."""

    name: str
    passed: int
    failed: int
    refused: int


def matrix(results: Sequence[Result]) -> list[Family]:
    """Return the rows of all families, in the order of their checks."""
    rows = []
    for name in dict.fromkeys(result.family for result in results if result.family):
        own = Counter(r.outcome for r in results if r.family == name)
        rows.append(Family(name, own["passed"], own["failed"] + own["crashed"], own["skipped"]))
    return rows


def refused_operators(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Return the refused operators, each with the number of checks that it prevented.

    The order is by prevented checks of models (`programs/...`), then by all prevented checks.
    """
    counts = Counter[str]()
    models = Counter[str]()
    for result in results:
        if result.outcome == "skipped":
            operators = set(_REFUSED.findall(result.message))
            counts.update(operators)
            if result.name.startswith("programs/"):
                models.update(operators)
    return sorted(counts.items(), key=lambda item: (-models[item[0]], -item[1], item[0]))


def next_steps(results: Sequence[Result], level: str) -> list[str]:
    failed = [result for result in results if result.failed]
    if failed:
        first = failed[0]
        return [f"repair {first.name} first: {first.suspect}"]
    steps = []
    refused = refused_operators(results)
    if refused:
        names = ", ".join(name for name, _ in refused[:6])
        steps.append(f"write kernels for these next: {names}")
    higher = {"core": "training", "training": "full"}.get(level)
    if higher:
        steps.append(f"continue with --level {higher}")
    return steps or ["nothing is left to do"]


_NOT_XML = {code: "?" for code in range(32) if code not in (9, 10, 13)}


def write_junit(path: Path, device: str, results: Sequence[Result]) -> None:
    """Write JUnit XML with a case per check. Raises `HetpipeError` if the file is not writable."""
    suite = ET.Element(
        "testsuite",
        {
            "name": f"hetpipe conform {device}",
            "tests": str(len(results)),
            "failures": str(sum(result.failed for result in results)),
            "skipped": str(sum(result.outcome == "skipped" for result in results)),
            "time": f"{sum(result.seconds for result in results):.3f}",
        },
    )
    for result in results:
        group, _, name = result.name.partition("/")
        about = {"classname": f"{device}.{group}", "name": name, "time": f"{result.seconds:.3f}"}
        case = ET.SubElement(suite, "testcase", about)
        if result.failed:
            ET.SubElement(case, "failure", message=_text(result.message)).text = _text(result.text)
        elif result.outcome == "skipped":
            ET.SubElement(case, "skipped", message=_text(result.message))
    tree = ET.ElementTree(suite)
    write_beside(path, lambda file: tree.write(file, encoding="utf-8", xml_declaration=True))


def _text(text: str) -> str:
    return text.translate(_NOT_XML)
