"""Options of the backend: the table [backend.pytorch] of a cluster file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The table [backend.pytorch]. Costs that were measured with other options are not used."""

    tf32: bool = False
    """Whether accelerators may round the operands of float32 products to ten bits (TF32). Products
    are then several times faster on some cards, and a thousand times less exact."""

    @property
    def changed(self) -> str:
        """The options that differ from the defaults, as a text for `DeviceInfo.driver`."""
        return ", tf32" if self.tf32 else ""
