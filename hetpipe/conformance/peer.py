"""The second process of the checks of windows, with the same device: it maps, writes and reads.

    the check: Other               this process: _Peer
    ask("write", pieces=...)  -->  write(pieces)
    raises BrokenRule         <--  the broken rule, if any

`python -m hetpipe.conformance.peer REFERENCE DEVICE` answers until its standard input ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetpipe.child import Child, ChildError, Parent
from hetpipe.conformance.check import BrokenRule, NotAsked, expect
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.rig import WAIT_S, Rig
from hetpipe.sdk.backend import Event, Window
from hetpipe.sdk.host.references import backend_reference, load_reference
from hetpipe.sdk.host.registry import open_bare

ANSWER_S = 2 * WAIT_S
"""Longest time for an answer; the first comes after the import of torch and the backend."""


@dataclass(frozen=True)
class Piece:
    """A tensor at an offset of a window; both processes make its values from `seed`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} at byte {self.offset}"

    def write(self, rig: Rig, window: Window) -> None:
        buffer = rig.put(random_array(self.dtype, self.shape, self.seed))
        _finish(window.write(buffer, self.offset), f"the write of {self}")

    def check(self, rig: Rig, window: Window) -> None:
        """Read the tensor. Raises `BrokenRule` if it has other bits."""
        buffer, event = window.read(self.offset, self.shape, self.dtype)
        _finish(event, f"the read of {self}")
        expect(buffer.shape == self.shape, f"the buffer of {self} has the shape {buffer.shape}")
        expect(buffer.dtype == self.dtype, f"the buffer of {self} has the dtype {buffer.dtype}")
        same(rig.get(buffer), random_array(self.dtype, self.shape, self.seed), str(self))


def _finish(event: Event, what: str) -> None:
    """Poll until the event has happened, because wait() could hide a wrong answer of done()."""
    end_s = time.monotonic() + WAIT_S
    while not event.done():
        expect(time.monotonic() < end_s, f"{what} has not ended after {WAIT_S:.0f} s")
        time.sleep(0)
    event.wait(WAIT_S)


class Other:
    """The second process, as the check sees it; a context manager."""

    def __init__(self, rig: Rig) -> None:
        reference = backend_reference(rig.info.backend)
        if reference is None:
            raise NotAsked("no other process can load a backend of a function or a prompt")
        self._child = Child("hetpipe.conformance.peer", reference, rig.info.id)

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the answer of a method of `_Peer`. Raises `BrokenRule` if the method fails."""
        try:
            self._child.send({"method": method, "arguments": arguments})
            answer = self._child.receive(ANSWER_S)
        except ChildError as error:
            raise BrokenRule(f"in the other process, {method}: {error}") from error
        if broken := answer["broken"]:
            raise BrokenRule(f"in the other process, {method}: {broken}")
        return answer["result"]

    def write(self, number: int, pieces: Sequence[Piece]) -> None:
        """Write to a window that the other process has mapped or opened."""
        self.ask("write", number=number, pieces=[asdict(piece) for piece in pieces])

    def check(self, number: int, pieces: Sequence[Piece]) -> None:
        self.ask("check", number=number, pieces=[asdict(piece) for piece in pieces])

    def map(self, handle: bytes, nbytes: int) -> int:
        """Map a window, and return its number."""
        return int(self.ask("map", handle=handle.hex(), nbytes=nbytes))


class _Peer:
    """The device in the second process, and its windows by number."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._windows: list[Window] = []

    def map(self, handle: str, nbytes: int) -> int:
        self._windows.append(self._rig.device.map_window(bytes.fromhex(handle), nbytes))
        return len(self._windows) - 1

    def open(self, nbytes: int) -> tuple[int, str]:
        opened = self._rig.device.open_window(nbytes)
        if opened is None:
            raise BrokenRule("open_window returns None here, but a window in the first process")
        self._windows.append(opened[0])
        return len(self._windows) - 1, opened[1].hex()

    def write(self, number: int, pieces: Sequence[dict[str, Any]]) -> None:
        for piece in _pieces(pieces):
            piece.write(self._rig, self._windows[number])

    def check(self, number: int, pieces: Sequence[dict[str, Any]]) -> None:
        for piece in _pieces(pieces):
            piece.check(self._rig, self._windows[number])


def _pieces(pieces: Sequence[dict[str, Any]]) -> list[Piece]:
    return [Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces]


def _answer(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": method(**arguments), "broken": ""}
    except BrokenRule as broken:
        return {"result": None, "broken": str(broken)}
    except Exception as error:
        return {"result": None, "broken": f"{type(error).__name__}: {error}"}


def main(reference: str, device_id: str) -> None:
    parent = Parent()
    load_reference(reference)
    peer = _Peer(Rig(open_bare(device_id)))
    for request in parent.requests():
        parent.send(_answer(getattr(peer, request["method"]), request["arguments"]))
    os._exit(0)  # skips the driver's exit handlers, which may crash


if __name__ == "__main__":
    main(*sys.argv[1:])
