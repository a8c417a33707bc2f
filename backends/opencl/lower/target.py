"""Facts about the device for which operators are lowered."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.sdk.info import DeviceInfo

from ..platform.tuning import Tuning


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
        """Macros to define in the sources of products."""
        no_prefetch = self.checks_memory or self.info.capabilities.untried
        named = {"NO_PREFETCH": no_prefetch, "NARROW": self.tuning.narrow}
        return tuple(name for name, is_set in named.items() if is_set)

    @property
    def checks_memory(self) -> bool:
        """Whether the device is an interpreter that reports accesses outside an allocation."""
        return self.info.capabilities.reference
