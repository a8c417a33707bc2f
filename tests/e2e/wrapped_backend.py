"""A hardware maker's backend outside hetpipe: a separate module that wraps numpy's."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.backends.numpy import NumpyBackend

from hetpipe.sdk import Device, DeviceInfo


class WrappedBackend(NumpyBackend):
    """Devices under another name, with a count of opened devices."""

    name = "wrapped"
    opened = 0

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(info, id=f"wrapped:unit:{index}", backend="wrapped")
            for index, info in enumerate(super().discover())
        ]

    def open(self, info: DeviceInfo) -> Device:
        WrappedBackend.opened += 1
        return super().open(info)
