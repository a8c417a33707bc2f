"""Facts about the device of a lowering."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.sdk.info import DeviceInfo


@dataclass(frozen=True)
class Target:
    """Facts of an opened device, in OpenCL's own terms."""

    info: DeviceInfo
    max_work_group_size: int
    compute_units: int
    local_memory_nbytes: int
    alignment_nbytes: int
    """Alignment of sub-buffers."""
    extensions: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """cpu, gpu, fpga or other."""
        return self.info.kind

    @property
    def checks_memory(self) -> bool:
        """Whether it is an interpreter that reports accesses outside an allocation."""
        return self.info.capabilities.reference
