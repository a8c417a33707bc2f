"""Keeps compiled programs on disk, for runtimes that would compile them in every process.

Intel's runtimes compile a matrix product in seconds, and load its binary in milliseconds.
"""

from __future__ import annotations

from typing import Any

from hetpipe.entries import Entries, key_of

from ..platform.driver import driver, errors, quiet
from ..platform.runtimes import cpu_flags, target_arch

ENTRIES = Entries("opencl/programs", "bin", most=2000)


def facts_of(cl_device: Any, on_cores: bool) -> dict[str, str]:
    """Return the facts that decide whether a device can use a binary, by name.

    `on_cores` adds the facts of the host's processor.
    """
    platform = cl_device.platform
    facts = {
        "platform": platform.name, "platform version": platform.version, "device": cl_device.name,
        "device version": cl_device.version, "driver": cl_device.driver_version,
    }  # fmt: skip
    if on_cores:
        facts |= {"target": target_arch(), "processor flags": key_of(sorted(cpu_flags()))}
    return facts


class Binaries:
    """The stored programs of one device, for its current driver and processor."""

    def __init__(self, cl_device: Any, device_id: str) -> None:
        self._cl_device = cl_device
        self._device_id = device_id
        self._facts = tuple(facts_of(cl_device, on_cores=True).items())

    def load(self, context: Any, source: str, options: tuple[str, ...]) -> Any:
        """Return the built program, or None if no binary is stored.

        Warns with `CacheWarning` if the runtime refuses the stored binary.
        """
        key = self._key(source, options)
        binary = ENTRIES.load(key)
        if binary is None:
            return None
        cl = driver()
        try:
            with quiet():
                return cl.Program(context, [self._cl_device], [binary]).build()
        except cl.Error as error:
            ENTRIES.refuse(key, error)
            return None

    def store(self, program: Any, source: str, options: tuple[str, ...]) -> None:
        """Store the binary that the runtime has compiled from `source`."""
        with errors(self._device_id, "reading a compiled program"):
            (binary,) = program.get_info(driver().program_info.BINARIES)
        ENTRIES.store(self._key(source, options), binary)

    def _key(self, source: str, options: tuple[str, ...]) -> str:
        return key_of(self._facts, source, options)
