"""The clusters of papers."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from hetpipe.cluster.cluster_file import ClusterFile, read_cluster_file
from hetpipe.errors import ClusterError
from hetpipe.words import choices, short

_FOLDER = files("hetpipe.cluster") / "papers"
"""TOML files, each with the source of its figures."""


def read_paper_cluster(name: str) -> ClusterFile:
    """Read the paper cluster of this name. Raises `ClusterError` with the known names."""
    names = published_names()
    if name not in names:
        raise ClusterError(
            f"no published cluster {short(name)}, and no file; {choices(name, names)}"
        )
    with as_file(_FOLDER / f"{name}.toml") as path:
        return read_cluster_file(path)


def published_names() -> tuple[str, ...]:
    """Return the names of all paper clusters, in alphabetical order."""
    return tuple(sorted(Path(file.name).stem for file in _FOLDER.iterdir()))
