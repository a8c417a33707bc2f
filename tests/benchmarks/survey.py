"""Survey of torch's operator database: the entries that each backend refuses, as a list and a page.

    hetpipe conform opencl --device opencl:pocl:0 --level full --group database --json found.json
    export PYTHONPATH=tests
    python -m benchmarks.survey tests/backend/database.toml docs/operators.md found.json

The first command runs the checks. The last puts their results into the list and writes the page;
without its last argument, it only writes the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetpipe.conformance.database import entries
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside
from hetpipe.records import read_text
from hetpipe.toml import parse_toml

UNASKED, REFUSED = "not asked: ", "refused: "
"""The beginnings of messages of skipped checks."""
_LACKING = re.compile(r"([a-z_0-9]+(?:\.[A-Za-z_0-9]+)+) \((.*?)\)(?:; |$)")
FAMILIES = {
    "activations, losses, layers": "nn_functional_",
    "linear algebra": "linalg_ addmm addmv addr addbmm bmm baddbmm mm mv matmul inner outer kron"
    " dot vdot cholesky qr lu svd triangular_solve pinverse logdet ormqr geqrf matrix_exp"
    " tensordot norm trace chain einsum",
    "special functions": "special_ polygamma mvlgamma igamma i0 erf lgamma digamma sinc",
    "Fourier transforms": "fft_ stft istft",
    "windows of signals": "signal_",
    "reads and writes at places": "index gather scatter take put select embedding where masked_fill"
    " masked_scatter masked_select nonzero argwhere as_strided_scatter slice_scatter"
    " diagonal_scatter",
    "reductions": "masked_ cum logcumsumexp trapezoid trapz diff dist var std count_nonzero"
    " aminmax",
    "sorting and searching": "sort argsort msort topk kthvalue median nanmedian mode unique"
    " searchsorted bucketize isin hist quantile nanquantile cummax cummin",
}
"""Beginnings of entry names by family; for other names, the class of the entry decides."""


@dataclass(frozen=True)
class Survey:
    """The entries that no backend is asked to run, and the entries that each backend refuses.

    Both map names of entries to reasons. `torch` is the version of the database, such as 2.13.
    """

    torch: str
    unasked: Mapping[str, str]
    refused: Mapping[str, Mapping[str, str]]

    def status(self, backend: str, name: str) -> str:
        """Return the message of a check that skips an entry; "" if the entry runs."""
        if name in self.unasked:
            return UNASKED + self.unasked[name]
        reason = self.refused.get(backend, {}).get(name)
        return "" if reason is None else REFUSED + reason


def version() -> str:
    """Return torch's major and minor version, on which the database depends."""
    return ".".join(torch.__version__.split(".")[:2])


def read(path: Path) -> Survey:
    """Read the list from a file. Raises `HetpipeError` if the file cannot be read or parsed."""
    table = parse_toml(read_text(path, HetpipeError), path, HetpipeError)
    return Survey(table.pop("torch"), table.pop("unasked"), table)


def cause(reason: str) -> str:
    """Shorten a reason to the missing dtypes or operators, or return it if it names none."""
    lacking = _LACKING.findall(reason)
    if not lacking:
        return reason
    by_dtype = sorted({f"dtype {each}" for each in re.findall(r"\(dtype (\w+) ", reason)})
    operators = dict.fromkeys(name.rpartition(".")[0] for name, _ in lacking)
    return ", ".join(by_dtype or operators)


def found(survey: Survey, backend: str, results: Iterable[Mapping[str, Any]]) -> Survey:
    """Return the list updated with the results of the database's checks on one device."""
    unasked, refused = dict(survey.unasked), {}
    for result in results:
        name, message = result["name"].partition("/")[2], result["message"]
        if message.startswith(UNASKED):
            unasked[name] = message.removeprefix(UNASKED)
        elif message.startswith(REFUSED):
            refused[name] = cause(message.removeprefix(REFUSED))
    return replace(survey, unasked=unasked, refused={**survey.refused, backend: refused})


def text(survey: Survey) -> str:
    """Return the list as TOML."""
    lines = [f"torch = {json.dumps(survey.torch)}"]
    for title, table in {"unasked": survey.unasked, **survey.refused}.items():
        rows = (f"{name} = {json.dumps(reason)}" for name, reason in sorted(table.items()))
        lines += ["", f"[{title}]", *rows]
    return "\n".join(lines) + "\n"


def family(name: str) -> str:
    """Return an entry's family, by the longest beginning that fits or else by the class."""
    found = [
        (len(begin), title)
        for title, begins in FAMILIES.items()
        for begin in begins.split()
        if name.startswith(begin)
    ]
    if found:
        return max(found)[1]
    kind = type(entries()[name]).__name__
    return {
        "UnaryUfuncInfo": "pointwise, of one tensor",
        "BinaryUfuncInfo": "pointwise, of two tensors",
        "ReductionOpInfo": "reductions",
    }.get(kind, "views, copies and others")


def page(survey: Survey) -> str:
    """Return the text of docs/operators.md."""
    asked = [name for name in entries() if name not in survey.unasked]
    backends = sorted(survey.refused)
    families = sorted({family(name) for name in asked})
    rows = [["family", "asked", *backends]]
    for title in [*families, "all"]:
        own = [name for name in asked if title in (family(name), "all")]
        runs = [len(own) - len(survey.refused[each].keys() & own) for each in backends]
        rows.append([title, str(len(own)), *map(str, runs)])
    counts = Counter(survey.unasked.values())
    lines = [
        *HEAD.format(torch=survey.torch, entries=len(entries()), asked=len(asked)).splitlines(),
        "", *_table(rows), "", "## Not asked", "",
        *_table([["entries", "reason"], *([str(n), why] for why, n in counts.most_common())]),
    ]  # fmt: skip
    for refusing, refused in sorted(_by_backends(survey).items()):
        lines += ["", f"## Refused by {' and '.join(refusing)}", "", *_refusals(refused)]
    return "\n".join(lines) + "\n"


def _by_backends(survey: Survey) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the refused entries with their reasons, by the backends that give that reason."""
    refusing: dict[tuple[str, str], list[str]] = {}
    for backend, refused in sorted(survey.refused.items()):
        for entry in refused.items():
            refusing.setdefault(entry, []).append(backend)
    tables: dict[tuple[str, ...], dict[str, str]] = {}
    for (name, why), backends in refusing.items():
        tables.setdefault(tuple(backends), {})[name] = why
    return tables


def _refusals(refused: Mapping[str, str]) -> list[str]:
    """Return a table of refused entries by family and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, why in sorted(refused.items()):
        groups.setdefault((family(name), why), []).append(f"`{name}`")
    rows = [[title, ", ".join(names), why] for (title, why), names in sorted(groups.items())]
    return _table([["family", "entries", "refused"], *rows])


def _table(rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


HEAD = """\
# Operators

torch has a database of its operators with sample arguments, which torch's own tests use. An *entry*
of the database is one operator with its samples. This page lists the entries that each of hetpipe's
backends refuses. `benchmarks.survey` writes the page from a list, and a test checks the list.

The backends were asked to run {asked} of the {entries} entries that torch {torch} has in float32.
They were not asked to run entries that torch cannot run or trace, nor entries whose results are
random, complex, uninitialised or no tensors.

An entry runs on a backend if the largest of its first 24 samples runs, forward and with all
gradients that torch has, and if every result equals torch's result in float64 within the bounds of
[the conformance suite](conformance.md#error-classes). A backend refuses every other entry before it
runs, and names the operator or the dtype. No entry gives a wrong result or crashes.

The first table counts the entries that run. The last tables name the dtype or the operators that a
backend refuses when it is asked to run an entry. Some operators are refused only for the dtype or
the arguments of this entry. For example, numpy multiplies (`aten.mul`), but not complex numbers.
"""


def main(data: Path, target: Path, results: Path | None = None) -> None:
    """Put the results, if given, into the list `data`, and write the page to `target`."""
    survey = read(data) if data.is_file() else Survey(version(), {}, {})
    if results is not None:
        for device, report in json.loads(results.read_text(encoding="utf-8"))["devices"].items():
            survey = found(survey, device.partition(":")[0], report["results"])
        write_beside(data, text(survey))
    write_beside(target, page(survey))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
