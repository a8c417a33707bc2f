"""The memory that the devices of a crew have for stages now, while other processes use them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.sdk.backend import Device
from hetpipe.sdk.info import is_host_memory

STEPS = 64
"""Room is rounded down to this part of a memory, so that plans stay the same while it hardly
changes."""
LITTLE = 0.5
"""Warn if the room is below this share of the memory."""


class RoomWarning(UserWarning):
    """A large part of a device's memory is not available."""


def with_room(tables: Mapping[int, CostTable], crew: Crew) -> dict[int, CostTable]:
    """Return the tables with the memory that each device has for stages now.

    Stored tables have the whole memory, because the room changes from run to run. Nothing is asked
    of devices in the host's memory.
    """
    separate = [id for id, info in crew.infos.items() if not is_host_memory(info.memory_domain)]
    if not tables or not separate:
        return dict(tables)
    asked = crew.call(separate, "hetpipe.profile.room:available")
    rooms = {}
    for member, available_nbytes in zip(separate, asked, strict=True):
        total_nbytes = crew.infos[member].memory_nbytes
        rooms[member] = room_nbytes(total_nbytes, available_nbytes)
        if rooms[member] < LITTLE * total_nbytes:
            warnings.warn(
                f"{member} has room for {rooms[member]} bytes in a memory of {total_nbytes} bytes: "
                "other processes use the device. Plans use only this room; end the other "
                "processes to use more",
                RoomWarning,
                stacklevel=3,
            )
    return {
        size: replace(
            table,
            devices={
                id: replace(cost, memory_nbytes=rooms.get(id, cost.memory_nbytes))
                for id, cost in table.devices.items()
            },
        )
        for size, table in tables.items()
    }


def room_nbytes(total_nbytes: int, available_nbytes: int | None) -> int:
    """Return the bytes for stages; with None, which is no answer, all bytes."""
    if available_nbytes is None or available_nbytes >= total_nbytes:
        return total_nbytes
    step = max(total_nbytes // STEPS, 1)
    return max(available_nbytes, 0) // step * step


def available(device: Device) -> int | None:
    """Ask a device in its worker."""
    return device.memory_available_nbytes()
