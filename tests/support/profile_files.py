"""Writes profiles in PipeDream's format, for tests that read them."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from hetpipe.cost.pipedream_profile import FIELDS, SEPARATOR, STAGE, ProfileGraph


def write_profile(profile: ProfileGraph, path: Path) -> None:
    """Write a profile, so that `read_profile` reads an equal one."""
    lines = []
    for node in profile.nodes:
        values = (
            _milliseconds(node.forward_s),
            _milliseconds(node.backward_s),
            str(node.activation_nbytes),
            str(node.params_nbytes),
        )
        costs = ", ".join(f"{key}={value}" for key, value in zip(FIELDS, values, strict=True))
        stage = () if node.stage is None else (f"{STAGE}{node.stage}",)
        lines.append(SEPARATOR.join((node.name, node.description, costs, *stage)))
    lines += ["\t" + SEPARATOR.join(edge) for edge in profile.edges]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _milliseconds(time_s: float) -> str:
    """Return the milliseconds in decimal digits, exactly: a reader gets the same float."""
    return format(Decimal(repr(float(time_s))).scaleb(3), "f")
