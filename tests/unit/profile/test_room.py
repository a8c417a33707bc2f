"""Plans take the memory that a card has now; stored costs keep the whole memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tables import make_table

from hetpipe.profile import stored as stored_module
from hetpipe.profile.room import RoomWarning, available, room_nbytes
from hetpipe.sdk.backend import Device
from hetpipe.sdk.info import DeviceInfo

GIB = 1 << 30


class Crew:
    """A processor, and a card of 64 GiB with this room."""

    def __init__(self, available_nbytes: int | None, alone: bool = False) -> None:
        cpu = DeviceInfo("a:cpu:0", "a", "cpu", "", "", "", 8 * GIB, "host")
        card = DeviceInfo("a:gpu:0", "a", "gpu", "", "", "", 64 * GIB, "pci:0000:3b:00")
        self.infos = {"cpu": cpu} if alone else {"cpu": cpu, "card": card}
        self.available_nbytes = available_nbytes

    def call(self, members: Sequence[str], function: str) -> list[int | None]:
        assert members == ["card"], "a device in the host's memory was asked"
        assert function == f"{available.__module__}:{available.__name__}"
        device: Any = SimpleNamespace(memory_available_nbytes=lambda: self.available_nbytes)
        return [available(device)]


def stored(monkeypatch: pytest.MonkeyPatch, crew: Crew) -> dict[str, int]:
    """Return the memory of the members in costs that an earlier profile has stored."""
    whole = make_table({"cpu": 1.0, "card": 9.0}, memory=64 * GIB)
    monkeypatch.setattr(stored_module, "entries_of", lambda *args: {})
    monkeypatch.setattr(stored_module, "load_tables", lambda *args: {4: whole})
    anything: Any = None
    one: Any = crew
    tables = stored_module.stored_costs(anything, one, anything, [4])
    return {id: cost.memory_nbytes for id, cost in tables[4].devices.items()}


def test_a_card_that_others_use_has_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans took the whole memory of a card, although another process held a part of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored(monkeypatch, Crew(48 * GIB + 7)) == {"cpu": 64 * GIB, "card": 48 * GIB}
        assert stored(monkeypatch, Crew(None)) == {"cpu": 64 * GIB, "card": 64 * GIB}
        assert stored(monkeypatch, Crew(0, alone=True)) == {"cpu": 64 * GIB, "card": 64 * GIB}
    with pytest.warns(RoomWarning, match=f"card has room for {16 * GIB} bytes in a memory of "):
        assert stored(monkeypatch, Crew(16 * GIB)) == {"cpu": 64 * GIB, "card": 16 * GIB}


def test_small_changes_leave_the_room_as_it_is() -> None:
    assert room_nbytes(64 * GIB, 40 * GIB + 1) == room_nbytes(64 * GIB, 41 * GIB - 1) == 40 * GIB
    assert room_nbytes(64 * GIB, 65 * GIB) == 64 * GIB
    assert room_nbytes(64 * GIB, -1) == 0
    assert room_nbytes(10, 7) == 7


def test_a_device_without_an_answer_has_its_whole_memory() -> None:
    device: Any = SimpleNamespace()
    assert Device.memory_available_nbytes(device) is None
