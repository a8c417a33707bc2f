"""Options of the backend in a cluster file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hetpipe.records import Name, Number, OneOf

from .platform.families import FAMILIES


@dataclass(frozen=True)
class Options:
    """The table [backend.opencl] of a cluster file."""

    kernels: tuple[str, ...] = ()
    """Specifications of user kernels, which take precedence over shipped kernels."""
    bundles: Name | None = None
    """A folder of bundles, which are loaded instead of compiling kernels."""
    families: dict[str, Annotated[str, OneOf(FAMILIES)]] = field(default_factory=dict)
    """Families of shipped kernels, by device id or by a pattern such as `opencl:pocl:*`."""
    channels: bool = True
    """Whether channels join kernels of the family fpga, on devices that support channels."""
    dataflow_limit_s: Annotated[float, Number(above=True)] = 600.0
    """Seconds in which no kernel of a dataflow ends, after which it counts as stuck."""
