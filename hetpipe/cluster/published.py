"""Clusters of papers, as files beside this one; each says where its figures are from."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from hetpipe.cluster.cluster import Cluster, choices
from hetpipe.cluster.file import load
from hetpipe.errors import ClusterError
from hetpipe.words import short

_FOLDER = files("hetpipe.cluster") / "papers"


def published(name: str) -> Cluster:
    """The cluster of that name. Raises `ClusterError` with the names that there are."""
    names = published_names()
    if name not in names:
        raise ClusterError(
            f"no published cluster {short(name)}, and no file; there is {choices(name, names)}"
        )
    with as_file(_FOLDER / f"{name}.toml") as path:
        return load(path)


def published_names() -> tuple[str, ...]:
    """All names, in alphabetical order."""
    return tuple(sorted(Path(file.name).stem for file in _FOLDER.iterdir()))


def file_or_published(text: str) -> Cluster:
    """The cluster of a file; without such a file and a suffix, of that name.

    Raises `ClusterError`.
    """
    path = Path(text)
    return load(path) if path.suffix or path.exists() else published(text)
