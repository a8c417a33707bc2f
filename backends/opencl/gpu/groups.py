"""Launches in work-groups: several work-items for each row, or one for each element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.signature import Argument


def launch_rows(
    builder: Builder, file: str, function: str, length: int, args: Mapping[str, Argument],
    inplace: Iterable[Value] = (),
) -> None:  # fmt: skip
    """Launch a kernel of `kernels/gpu/` over `args["rows"]` rows of `length`; see `rows.cl`."""
    group = builder.device.group
    lanes = builder.device.lanes(length, group)
    macros = (f"GROUP={group}", f"LANES={lanes}")
    kernel = Kernel.of_files(function, ("gpu/rows.cl", f"gpu/{file}"), *macros)
    rows = args["rows"]
    assert isinstance(rows, int)
    size = math.ceil(rows / (group // lanes)) * group
    builder.launch(kernel, (size,), args, (group,), inplace=inplace)


def launch_elements(
    builder: Builder, kernel: Kernel, count: int, args: Mapping[str, Argument], group: int = 0
) -> None:
    """Launch at least `count` work-items, in groups of `group` or of the usual size."""
    group = group or builder.device.group
    builder.launch(kernel, (math.ceil(count / group) * group,), args, (group,))
