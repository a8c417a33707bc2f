"""Facts about the device of a lowering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetpipe.sdk.info import DeviceInfo

from .tuning import Tuning

if TYPE_CHECKING:
    from .ops.registry import Lowering


@dataclass(frozen=True)
class Target:
    """Facts of an opened device, in OpenCL's own terms."""

    info: DeviceInfo
    max_work_group_size: int
    compute_units: int
    local_memory_nbytes: int
    alignment_nbytes: int
    """Alignment of sub-buffers."""
    lowerings: Mapping[str, Lowering]
    """By operator: those of the device's backend."""
    extensions: frozenset[str] = frozenset()
    tuning: Tuning = field(default_factory=Tuning)
    last_cache_nbytes: int = 1 << 25
    """Of the processor's largest cache, which its cores share."""
    channels: bool = False
    """Whether kernels may run at once and send to one another through channels."""
    family: str = "cpu"
    """The folder of `kernels/` for products and convolutions: one of `families.FAMILIES`."""

    @property
    def kind(self) -> str:
        """cpu, gpu, fpga or other."""
        return self.info.kind

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros with which the files of products are read."""
        no_prefetch = self.checks_memory or self.info.capabilities.untried
        named = {"NO_PREFETCH": no_prefetch, "NARROW": self.tuning.narrow}
        return tuple(name for name, is_set in named.items() if is_set)

    @property
    def checks_memory(self) -> bool:
        """Whether it is an interpreter that reports accesses outside an allocation."""
        return self.info.capabilities.reference
