"""How the OpenCL backend describes graphics cards: all imitated, except for one question."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hetpipe.backends.opencl import OpenCLBackend
from hetpipe.backends.opencl import backend as module
from hetpipe.backends.opencl.platform import vendors

from hetpipe.cluster.topology import Link
from hetpipe.sdk.info import DeviceInfo, host_memory_nbytes
from hetpipe.wire.transport import Outlet

cl = pytest.importorskip("pyopencl")
GIB = 1 << 30


class Card(SimpleNamespace):
    """A card of this vendor. `places` has the driver's answers about its address."""

    def __init__(self, vendor: str, extension: str, unified: bool = False, **places: Any) -> None:
        super().__init__(
            type=cl.device_type.GPU, name="card", vendor=vendor, version="OpenCL 3.0", int_ptr=0,
            extensions=f"cl_khr_fp64 {extension}", global_mem_size=8 * GIB, single_fp_config=0,
            host_unified_memory=int(unified), platform=SimpleNamespace(name=vendor), **places,
        )  # fmt: skip


class Nvidia(Card):
    def __init__(self, bus: int, **places: Any) -> None:
        super().__init__(
            "NVIDIA Corporation", "cl_nv_device_attribute_query", pci_bus_id_nv=bus,
            pci_slot_id_nv=3 << 3 | 1, **places,
        )  # fmt: skip

    @property
    def pci_domain_id_nv(self) -> int:
        raise cl.LogicError("clGetDeviceInfo failed: INVALID_VALUE")


class Amd(Card):
    def __init__(self, bus: int, **more: Any) -> None:
        place = SimpleNamespace(bus=bus - 256 if bus > 127 else bus, device=0, function=0)
        super().__init__("AMD", "cl_amd_device_attribute_query", topology_amd=place, **more)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that describes the cards of some platforms."""

    def describe(*platforms: list[Card]) -> list[DeviceInfo]:
        there = [
            SimpleNamespace(name="cards", get_devices=lambda cards=cards: cards)
            for cards in platforms
        ]
        monkeypatch.setattr(module, "platforms", lambda: there)
        return OpenCLBackend().discover()

    return describe


def test_a_card_has_the_address_that_its_other_drivers_give(found: Any) -> None:
    """Its memory domain was its id, so it was another card than torch's."""
    nvidia, amd = found([Nvidia(0x3B)], [Amd(0xAF)])
    assert nvidia.address == nvidia.memory_domain == "pci:0000:3b:03"
    assert amd.address == amd.memory_domain == "pci:0000:af:00"
    assert (amd.memory_nbytes, amd.on_cores) == (8 * GIB, False)


def test_the_common_question_comes_first(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(device: Any, question: int, count: int) -> tuple[int, ...]:
        asked.append(question)
        return 1, 0x3B, 2, 0

    monkeypatch.setattr(vendors, "ask", ask)
    card = Nvidia(0)
    card.extensions += " cl_khr_pci_bus_info"
    (info,) = found([card])
    assert (info.address, asked) == ("pci:0001:3b:02", [0x410F])


def test_a_driver_that_tells_no_address(found: Any) -> None:
    (info,) = found([Card("Someone", "")])
    assert (info.address, info.memory_domain) == ("", info.id)


def test_parts_of_a_card_have_separate_memory_and_two_drivers_of_it_have_not(found: Any) -> None:
    cards = found([Amd(1), Amd(1), Amd(2)], [Amd(2)])
    assert [card.memory_domain for card in cards] == [
        "pci:0000:01:00/0", "pci:0000:01:00/1", "pci:0000:02:00", "pci:0000:02:00",
    ]  # fmt: skip


def test_an_integrated_gpu_computes_in_the_hosts_memory(found: Any) -> None:
    """Its memory was counted beside the host's."""
    card = Amd(0, unified=True)
    card.global_mem_size = 2 * host_memory_nbytes()
    (info,) = found([card])
    assert (info.memory_domain, info.memory_nbytes) == ("host", host_memory_nbytes())
    assert (info.address, info.on_cores) == ("pci:0000:00:00", False)


def test_only_amds_driver_tells_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free_kib = 5 << 32 | 7
    monkeypatch.setattr(vendors, "ask", lambda device, question, count: (7, 5, 0, 0))
    assert vendors.free_nbytes(Amd(0)) == free_kib << 10
    assert vendors.free_nbytes(Nvidia(0)) is None


def test_pocl_on_a_card_is_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only PoCL's processors are a known runtime; its cards are graphics cards like any other."""
    platform = SimpleNamespace(name="Portable Computing Language")
    platform.get_devices = lambda: [Card("NVIDIA Corporation", "")]
    monkeypatch.setattr(module, "platforms", lambda: [platform])
    (info,) = OpenCLBackend().discover()
    assert (info.id, info.kind, info.memory_domain) == ("opencl:nvidia:0", "gpu", "opencl:nvidia:0")
    assert not info.on_cores
    assert info.capabilities.untried


class Roomy(Outlet):
    def _has_room(self) -> bool:
        return True

    def _acquire(self, kind: Any) -> Any: ...
    def _commit(self, *args: Any) -> None: ...
    def close(self) -> None: ...


def test_only_the_driver_copies_from_an_integrated_gpu(found: Any) -> None:
    """A device in the host's memory copied its messages on the thread that computes."""
    (info,) = found([Amd(0, unified=True)])
    wire: Any = SimpleNamespace(layouts={})
    immediate = []
    for each in (info, replace(info, kind="cpu")):
        device: Any = SimpleNamespace(info=each)
        immediate.append(Roomy(wire, device, Link()).immediate())
    assert immediate == [False, True]


def test_the_driver_answers_with_numbers() -> None:
    """CL_DEVICE_VENDOR_ID and CL_DEVICE_MAX_COMPUTE_UNITS stand for the address, which no
    processor has."""
    devices = [device for platform in module.platforms() for device in platform.get_devices()]
    for device in devices:
        assert vendors.ask(device, 0x1001, 1) == (device.vendor_id,)
        assert vendors.ask(device, 0x1002, 1) == (device.max_compute_units,)
        with pytest.raises(ValueError, match="0x410f"):
            vendors.ask(device, vendors.PCI_BUS_INFO_KHR, 4)
