"""Reads the architecture of an ELF file from its header."""

from __future__ import annotations

import sys
from pathlib import Path

_MACHINES = {
    3: "x86", 8: "MIPS", 20: "PowerPC", 21: "PowerPC64", 22: "S/390", 40: "ARM", 62: "x86-64",
    183: "AArch64", 243: "RISC-V", 258: "LoongArch",
}  # fmt: skip
"""The values of `e_machine`."""
_LENGTH = 20  # up to the end of `e_machine`


def architecture(path: Path) -> str:
    """Return the machine, word size and byte order of an ELF file; "" for any other file."""
    try:
        with path.open("rb") as file:
            header = file.read(_LENGTH)
    except OSError:
        return ""
    if len(header) < _LENGTH or header[:4] != b"\x7fELF":
        return ""
    order = "big" if header[5] == 2 else "little"
    number = int.from_bytes(header[18:20], order)  # type: ignore[arg-type] # one of the two
    bits = 64 if header[4] == 2 else 32
    return f"{_MACHINES.get(number, f'machine {number}')} ({bits} bit, {order}-endian)"


def mismatch(path: Path) -> str:
    """Explain that a library is built for another architecture; return "" if it is not."""
    there, here = architecture(path), architecture(Path(sys.executable).resolve())
    if not there or not here or there == here:
        return ""
    return f"it is built for {there}, this Python for {here}: build the library for {here}"
