"""Which devices torch's backend describes, and how, on machines with cards: all imitated."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hetpipe.backends.pytorch import PyTorchBackend

from hetpipe.sdk.info import DeviceInfo, host_memory_nbytes

GIB = 1 << 30


@dataclass
class Module:
    """torch's module of a device type. It lacks everything that makes a context on a card."""

    properties: list[Any]

    def get_device_properties(self, index: int) -> Any:
        return self.properties[index]


def cuda(bus: int, nbytes: int = 80 * GIB, **more: Any) -> Any:
    return SimpleNamespace(
        name="card", total_memory=nbytes, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, **more
    )


def xpu(bus: int, part: int = 0, **more: Any) -> Any:
    """The properties have no address, but Intel's UUID."""
    uuid = [0x86, 0x80, 0xD5, 0x0B, 0x2F, 0, 1, 0, bus, 2, 0, 0, 0, 0, 0, part]
    shared = {"name": "card", "total_memory": 64 * GIB, "uuid": SimpleNamespace(bytes=uuid)}
    return SimpleNamespace(**{**shared, "has_fp64": True, **more})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a machine of this kind of cards and returns their infos."""

    def discover(kind: str, module: Any, count: int) -> list[DeviceInfo]:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind)
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
        processor, *cards = PyTorchBackend().discover()
        assert processor.id == "pytorch:cpu:0"
        assert [card.id for card in cards] == [f"pytorch:{kind}:{n}" for n in range(count)]
        return cards

    return discover


def test_each_card_has_its_memory_under_its_address(machine: Any) -> None:
    cards = machine("cuda", Module([cuda(0x3B), cuda(0xAF)]), 2)
    assert [card.address for card in cards] == ["pci:0000:3b:00", "pci:0000:af:00"]
    assert [card.memory_domain for card in cards] == [card.address for card in cards]
    assert [card.memory_nbytes for card in cards] == [80 * GIB] * 2


def test_parts_of_one_card_have_separate_memory(machine: Any) -> None:
    """Capacity was counted once for both parts."""
    parts = [xpu(0x3B, part=1), xpu(0x3B, part=2), xpu(0xAF)]
    cards = machine("xpu", Module(parts), 3)
    assert [card.address for card in cards] == ["pci:0001:3b:02"] * 2 + ["pci:0001:af:02"]
    assert [card.memory_domain for card in cards] == [
        "pci:0001:3b:02/0", "pci:0001:3b:02/1", "pci:0001:af:02",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "properties"),
    [("cuda", cuda(0, is_integrated=1)), ("xpu", xpu(0, is_integrated_gpu=True))],
)
def test_integrated_gpus_compute_in_the_hosts_memory(
    machine: Any, kind: str, properties: Any
) -> None:
    """They had separate memory domains, so the host's memory was counted twice."""
    properties.total_memory = 2 * host_memory_nbytes()
    (card,) = machine(kind, Module([properties]), 1)
    assert (card.memory_domain, card.memory_nbytes) == ("host", host_memory_nbytes())
    assert card.address.startswith("pci:")
    assert not card.on_cores


def test_a_card_without_properties_has_its_own_memory(machine: Any) -> None:
    """Its memory domain was the host's."""
    first, second = machine("npu", SimpleNamespace(), 2)
    assert (first.memory_domain, second.memory_domain) == ("npu:0", "npu:1")
    (apple,) = machine("mps", SimpleNamespace(), 1)
    assert apple.memory_domain == "host"


def test_float64_only_where_the_card_has_it(machine: Any) -> None:
    (arc,) = machine("xpu", Module([xpu(0, has_fp64=False)]), 1)
    (apple,) = machine("mps", SimpleNamespace(), 1)
    (max_1550,) = machine("xpu", Module([xpu(0)]), 1)
    assert ["float64" in card.dtypes for card in (arc, apple, max_1550)] == [False, False, True]


def test_eight_cards_that_wake_up_slowly_are_found() -> None:
    """A driver that keeps no card awake takes up to 3 s for each, and 20 s were the limit."""
    assert PyTorchBackend.discover_limit_s >= 16 * 3
