"""Kernels in the folder `kernels/`, with their families."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

from hetpipe.sdk.kernels import Shipped

DECLARED = re.compile(r"__kernel\s+void\s+(\w+)")


def shipped_kernels() -> Sequence[Shipped]:
    """Return each `__kernel` of each file, by family; a file's first line gives the purpose."""
    return list(_kernels())


def _kernels() -> Iterator[Shipped]:
    root = files("hetpipe.kernels")
    folders = sorted(each.name for each in root.iterdir() if each.is_dir() and "_" not in each.name)
    for family in folders:
        for file in sorted((root / family).iterdir(), key=lambda each: each.name):
            if not file.name.endswith(".cl"):
                continue
            text = file.read_text(encoding="utf-8")
            purpose = text.partition("\n")[0].removeprefix("//").strip()
            for name in DECLARED.findall(text):
                yield Shipped(family, f"{family}/{file.name}", name, purpose)
