"""What a cluster file may say to the backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hetpipe.records import Name, Number, OneOf

from .families import FAMILIES


@dataclass(frozen=True)
class Options:
    """The table [backend.opencl] of a cluster file."""

    kernels: tuple[str, ...] = ()
    """Specifications of kernels that go before ours."""
    bundles: Name | None = None
    """A folder of bundles, which are loaded in place of compiling."""
    families: dict[str, Annotated[str, OneOf(FAMILIES)]] = field(default_factory=dict)
    """Families of our kernels, by the id of a device or by a pattern such as `opencl:pocl:*`."""
    channels: bool = True
    """Whether kernels of the family fpga are joined by channels where the device has them."""
    dataflow_limit_s: Annotated[float, Number(above=True)] = 600.0
    """Seconds without the end of a kernel after which a dataflow counts as stuck."""
