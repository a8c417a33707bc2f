"""Makes a table of a paper, by the names of paper and table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hetpipe import environment
from hetpipe.errors import HetpipeError
from hetpipe.records import read_text
from hetpipe.toml import parse_toml
from hetpipe.words import choices

DATA = "HETPIPE_DATA"
"""The environment variable that names the folder of published profiles and figures."""

PAPERS: dict[str, tuple[str, ...]] = {
    "pipedream": ("plans",),
    "dapple": ("3", "4", "7"),
    "bapipe": ("3", "4", "6"),
    "pipeoptim": ("5",),
}
"""The tables of each paper that can be made, by their numbers or names."""


@dataclass(frozen=True)
class Figure:
    """One row: the paper's figure, our figure, and a note about their difference."""

    name: str
    paper: str
    ours: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper; our figures are modelled or simulated."""

    paper: str
    name: str
    title: str
    rows: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return asdict(self)


Maker = Callable[[Path], tuple[str, list[Figure]]]
"""Function from the folder of published data to a table's title and rows."""


def reproduce(paper: str, name: str | None = None, data: Path | None = None) -> list[Table]:
    """Return the tables of a paper, or only the table `name`.

    `data` is the folder of published data, by default the folder that HETPIPE_DATA names. Raises
    `HetpipeError` for an unknown paper or table, or without the data.
    """
    check_names(paper, name)
    folder = data_folder(data)
    makers: Mapping[str, Maker] = import_module(f"hetpipe.papers.reproduced.{paper}").TABLES
    tables = []
    for each in PAPERS[paper] if name is None else (name,):
        title, rows = makers[each](folder)
        tables.append(Table(paper, each, title, tuple(rows)))
    return tables


def check_names(paper: str, name: str | None) -> None:
    """Raise `HetpipeError` for an unknown paper or table."""
    if paper not in PAPERS:
        raise HetpipeError(f"no paper {paper!r}; {choices(paper, PAPERS)}")
    if name is not None and name not in PAPERS[paper]:
        raise HetpipeError(
            f"no table {name!r} of {paper} can be reproduced; {choices(name, PAPERS[paper])}"
        )


def data_folder(data: Path | None = None) -> Path:
    """Return the folder of published data, by default the folder that HETPIPE_DATA names.

    Raises `HetpipeError` if it lacks profiles/ or expected/.
    """
    folder = data or environment.path(DATA)
    if folder is None:
        raise HetpipeError(
            f"{DATA} is unset: set it to the folder of the published profiles and figures, which "
            "has profiles/ and expected/"
        )
    for part in ("profiles", "expected"):
        if not (folder / part).is_dir():
            raise HetpipeError(
                f"{folder} has no folder {part}/ of published data: set {DATA} to the folder with "
                "profiles/ and expected/"
            )
    return folder


def expected(data: Path, paper: str) -> dict[str, Any]:
    """Return the published figures of a paper. Raises `HetpipeError` if they are missing."""
    path = data / "expected" / f"{paper}.toml"
    return parse_toml(read_text(path, HetpipeError), path, HetpipeError)
