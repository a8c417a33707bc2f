"""The error of modelled times, for the boards of a study."""

from __future__ import annotations

from collections.abc import Iterable

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost import fpga, gpu
from hetpipe.cost.board import Board, board
from hetpipe.study.subject import Subject
from hetpipe.words import words

FITTED = "v100-"
"""Begins the ids of the boards on which the model of graphics cards was fitted."""


def error_note(subject: Subject, clusters: Iterable[Cluster]) -> str:
    """Return a sentence on the error of modelled times; empty for clusters without boards."""
    ids = sorted({m.board for cluster in clusters for m in cluster.described})
    found: dict[str, list[str]] = {}
    for id in ids:
        found.setdefault(_error(subject, board(id)), []).append(id)
    unknown = found.pop(_UNKNOWN, [])
    parts = [f"{error} on {words(names)}" for error, names in found.items()]
    parts += [f"{_UNKNOWN} on {words(unknown)}"] if unknown else []
    return f"modelled times: {'; '.join(parts)}" if parts else ""


def _error(subject: Subject, board: Board) -> str:
    if subject.profiled_on:
        return "as profiled" if board.id == subject.profiled_on else _UNKNOWN
    if board.fabric is not None:
        return _median(fpga.ERROR, "product")
    return _median(gpu.V100.error, "layer") if board.id.startswith(FITTED) else _UNKNOWN


_UNKNOWN = "of unknown error"


def _median(error: float, what: str) -> str:
    return f"off by {100 * error:.0f} % for the median {what}"
