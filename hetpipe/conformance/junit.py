"""Results as JUnit XML, for build servers."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from hetpipe.conformance.run import Result
from hetpipe.files import write_beside

_NOT_XML = {code: "?" for code in range(32) if code not in (9, 10, 13)}


def write_junit(path: Path, device: str, results: Sequence[Result]) -> None:
    """Write a test suite with one test case per check. Raises `HetpipeError` if it cannot."""
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
