"""A vendor's shared library: cffi calls its functions as `hetpipe_backend.h` declares them."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from hetpipe.errors import BackendError, UnsupportedOperatorError

FOLDER = Path(__file__).resolve().parent
HEADER = FOLDER / "hetpipe_backend.h"
ENTRY = "hetpipe_backend_entry"
REQUIRED = (
    "name", "count", "describe", "open", "close", "allocate", "free", "upload", "download",
    "compile", "release_program", "run",
)  # fmt: skip
"""Members of the table that are never NULL."""
TOGETHER = ("wait", "release_event")
"""Two members that are either both set or both NULL."""


@cache
def interface() -> Any:
    """Return the types and constants of the header."""
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", HEADER.read_text("utf-8"), flags=re.DOTALL)
    make: Any = cffi.FFI  # cffi has no type hints
    ffi = make()
    try:
        ffi.cdef("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    except cffi.CDefError as error:
        raise BackendError(f"{HEADER} is damaged: {error}; install hetpipe again") from error
    return ffi


def constant(name: str) -> int:
    """Return a constant of the header: `constant("OK")` is `HETPIPE_OK`."""
    return int(getattr(_constants(), f"HETPIPE_{name}"))


@cache
def _constants() -> Any:
    return interface().dlopen(None)


class Library:
    """A loaded library, with its name and its table of functions."""

    def __init__(self, path: Path) -> None:
        """Raises `BackendError`, which begins with the path, if the file is no library, lacks the
        entry or a member of the table, or has another version of the interface."""
        ffi, self.path = interface(), path
        version = constant("ABI_VERSION")
        try:
            self._shared = ffi.dlopen(str(path))
        except OSError as error:
            reason = mismatch(path) or str(error).replace(f"cannot load library '{path}': ", "")
            raise BackendError(f"{path} cannot be loaded as a library: {reason}") from error
        try:
            entry = getattr(self._shared, ENTRY)
        except AttributeError as error:
            raise BackendError(
                f"{path} does not export {ENTRY}: it is no library for hetpipe, or hides the symbol"
            ) from error
        table = entry(version)
        if table == ffi.NULL:
            raise BackendError(
                f"{path} lacks version {version} of the interface, which this "
                "hetpipe needs: install a matching version of the library or of hetpipe"
            )
        if table.abi_version != version:
            raise BackendError(
                f"{path} has version {table.abi_version} of the interface, this hetpipe has "
                f"version {version}: install a matching version of the library or of hetpipe"
            )
        self._table = whole = ffi.new("hetpipe_backend *")
        size = min(table.struct_size, ffi.sizeof("hetpipe_backend"))
        ffi.memmove(whole, table, size)  # members that an older header lacks stay NULL
        missing = [name for name in REQUIRED if getattr(whole, name) == ffi.NULL]
        if missing:
            raise BackendError(f"{path} lacks {', '.join(missing)} in its table")
        if len({getattr(whole, name) == ffi.NULL for name in TOGETHER}) > 1:
            raise BackendError(f"{path} has only one of {' and '.join(TOGETHER)} in its table")
        self.name = ffi.string(whole.name).decode(errors="replace")

    def function(self, name: str) -> Any:
        """Return a function of the table, or None if the function is optional and missing."""
        function = getattr(self._table, name)
        return None if function == interface().NULL else function

    def call(self, doing: str, name: str, *arguments: Any) -> int:
        """Call a function, with room for an error as the last argument; return OK or NOT_YET.

        Raises `BackendError`, which begins with `doing`, or `UnsupportedOperatorError`.
        """
        ffi = interface()
        error = ffi.new("hetpipe_error *")
        code = int(getattr(self._table, name)(*arguments, error))
        if code in (constant("OK"), constant("NOT_YET")):
            return code
        text = text_of(error.text) or f"{name} gives no reason"
        if code == constant("UNSUPPORTED"):
            raise UnsupportedOperatorError(f"{doing}: {text}")
        if code != constant("FAILED"):
            text = f"{name} returns {code}, which the interface does not define; {text}"
        raise BackendError(f"{doing}: {text}")


@cache
def loaded(path: Path) -> Library:
    """Return the library; it is loaded once and never unloaded. Raises `BackendError`."""
    return Library(path)


def text_of(characters: Any) -> str:
    return bytes(interface().buffer(characters)).partition(b"\0")[0].decode(errors="replace")


class Handle:
    """A pointer of a library; when this object is deleted, `give_back` gets the pointer.

    `owner`, such as the device's handle, must outlive the pointer. Garbage collection deletes
    objects in any order, so the finalizer holds the owner. At the end of the process no pointer is
    given back, because work may still use it.
    """

    def __init__(self, pointer: Any, give_back: Callable[[Any], None], owner: object) -> None:
        self.pointer = pointer
        weakref.finalize(self, _ended, give_back, pointer, owner).atexit = False


def _ended(give_back: Callable[[Any], None], pointer: Any, owner: object) -> None:
    give_back(pointer)


_MACHINES = {
    3: "x86", 8: "MIPS", 20: "PowerPC", 21: "PowerPC64", 22: "S/390", 40: "ARM", 62: "x86-64",
    183: "AArch64", 243: "RISC-V", 258: "LoongArch",
}  # fmt: skip
"""Machines by number: `e_machine` in the header of an ELF file."""
_LENGTH = 20  # bytes of an ELF header up to the end of `e_machine`


def architecture(path: Path) -> str:
    """Return the machine, word size and byte order of an ELF file, or "" for any other file."""
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
    """Return a message if a library is built for another architecture than Python, else ""."""
    there, here = architecture(path), architecture(Path(sys.executable).resolve())
    if not there or not here or there == here:
        return ""
    return f"it is built for {there}, this Python for {here}: build the library for {here}"
