"""Facts about the device for which operators are lowered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hetpipe.sdk.info import DeviceInfo

from ..platform.tuning import Tuning
from .expr import Value
from .launch import Kernel

MOST_EACH = 16
"""Most rows per work-item of a kernel over rows."""
BALANCE = 4
"""Least work-items per compute unit if a work-item has several rows."""
LINE = 16
"""Floats per cache line."""
GROUP = 256
"""Most work-items of a work-group on a graphics card, except for products."""
LEAST = 4
"""Elements of a row per work-item, if several work-items of a graphics card share the row."""
PAST_CACHES = "PAST_CACHES"


@dataclass(frozen=True)
class Target:
    """Facts about an opened device, in OpenCL's terms."""

    info: DeviceInfo
    max_work_group_size: int
    compute_units: int
    local_memory_nbytes: int
    alignment_nbytes: int
    """Alignment of sub-buffers, in bytes."""
    extensions: frozenset[str] = frozenset()
    tuning: Tuning = field(default_factory=Tuning)
    last_cache_nbytes: int = 1 << 25
    """Size of the processor's largest cache, which its cores share."""
    channels: bool = False
    """Whether kernels may run concurrently and send data to each other through channels."""
    family: str = "cpu"
    """The folder of `kernels/` for products and convolutions: one of `families.FAMILIES`."""

    @property
    def kind(self) -> str:
        """Kind of device: cpu, gpu, fpga or other."""
        return self.info.kind

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of this device, see `kernel`."""
        no_prefetch = self.checks_memory or self.info.capabilities.untried
        named = {"NO_PREFETCH": no_prefetch, "NARROW": self.tuning.narrow}
        return tuple(name for name, is_set in named.items() if is_set)

    def kernel(self, name: str, files: Iterable[str], *macros: str) -> Kernel:
        """Return a kernel of files of `hetpipe.kernels`, with `macros` and the device's macros."""
        return Kernel.of_files(name, files, *macros, *self.defines)

    @property
    def checks_memory(self) -> bool:
        """Whether the device interprets kernels and reports accesses outside an allocation."""
        return self.info.capabilities.reference

    @property
    def group(self) -> int:
        """Work-items of a work-group on a graphics card, a power of two."""
        return 1 << (min(GROUP, self.max_work_group_size).bit_length() - 1)

    def lanes(self, length: int, most: int) -> int:
        """Return how many work-items share a row of `length` elements: a power of two <= `most`."""
        return min(most, 1 << (math.ceil(length / LEAST) - 1).bit_length())

    def rows_each(self, rows: int) -> int:
        """Return the rows per work-item of a kernel over rows.

        A work-item with several rows reads the next row while it computes one.
        """
        return max(1, min(MOST_EACH, rows // (BALANCE * self.compute_units)))

    def past_caches(self, result: Value, length: int) -> tuple[str, ...]:
        """Return (PAST_CACHES,) if a kernel should write rows of `length` past the caches, else ().

        This pays if the result and an operand of its size fill the last cache: the processor need
        not load lines that are overwritten anyway, and the cache keeps the rows that are read next.
        """
        large = 4 * math.prod(result.shape) >= self.last_cache_nbytes // 2
        processor = self.kind == self.family == "cpu" and not self.checks_memory
        return (PAST_CACHES,) if processor and large and length % LINE == 0 else ()
