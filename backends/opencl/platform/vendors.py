"""Questions about a card that each vendor's driver answers in another way.

The address on the PCI bus is the same for all drivers of a card. OpenCL's common question for it is
new, so older drivers answer only a question of their vendor. Only AMD's tells free memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hetpipe.sdk.info import pci_address

from .driver import driver

PCI_BUS_INFO_KHR = 0x410F
"""The number of OpenCL's common question; pyopencl has no name for it."""

AMD = "cl_amd_device_attribute_query"
FREE_MEMORY_AMD = 0x4039
"""The answer is a `size_t` in KiB, perhaps with a second one: the largest free block."""


def address_of(device: Any) -> str:
    """Return the address of a `pyopencl.Device`, or "" if its driver does not tell it."""
    extensions = device.extensions.split()
    for extension, place in _PLACES.items():
        if extension in extensions:
            return pci_address(*place(device))
    return ""


def _of_khronos(device: Any) -> tuple[int, int, int]:
    domain, bus, slot, _ = ask(device, PCI_BUS_INFO_KHR, 4)
    return domain, bus, slot


def _of_nvidia(device: Any) -> tuple[int, int, int]:
    try:
        domain = device.pci_domain_id_nv
    except driver().Error:  # an older driver
        domain = 0
    return domain, device.pci_bus_id_nv, device.pci_slot_id_nv >> 3  # below it: the function


def _of_amd(device: Any) -> tuple[int, int, int]:
    place = device.topology_amd
    return 0, place.bus & 0xFF, place.device & 0xFF  # they are signed characters


_PLACES = {
    "cl_khr_pci_bus_info": _of_khronos,
    "cl_nv_device_attribute_query": _of_nvidia,
    AMD: _of_amd,
}
"""The domain, the bus and the number on the bus of a device, by the extension that tells them."""


def free_nbytes(device: Any) -> int | None:
    """Return the free bytes of a card's memory; None if its driver does not tell them."""
    if AMD not in device.extensions.split():
        return None
    low, high, _, _ = ask(device, FREE_MEMORY_AMD, 4)
    return (high << 32 | low) << 10


def ask(device: Any, question: int, count: int) -> tuple[int, ...]:
    """Return `count` numbers of 32 bits that answer a question of `clGetDeviceInfo`.

    Raises `ValueError` if the driver does not know the question.
    """
    answer = (ctypes.c_uint32 * count)()
    ask_driver = ctypes.CDLL(driver()._cl.__file__).clGetDeviceInfo
    handle, nbytes = ctypes.c_void_p(device.int_ptr), ctypes.c_size_t(ctypes.sizeof(answer))
    status = ask_driver(handle, ctypes.c_uint32(question), nbytes, answer, None)
    if status != 0:
        raise ValueError(f"clGetDeviceInfo({question:#x}) returned {status}")
    return tuple(answer)
