"""The second process of the checks of windows and groups: it maps, writes, reads and sums.

    the check: Other               this process: _Peer
    ask("write", pieces=...)  -->  write(pieces)
    raises BrokenRule         <--  the broken rule, if any

Its device is the one under test, or another of the backend. `python -m hetpipe.conformance.peer
REFERENCE DEVICE` answers until its standard input ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetpipe.child import Child, ChildError, ChildLate, Parent
from hetpipe.conformance.check import BrokenRule, NotAsked
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.rig import WAIT_S, Rig, expect_form, finish
from hetpipe.conformance.sums import Sum, join, sum_all
from hetpipe.sdk.backend import Group, Window
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
        finish(window.write(buffer, self.offset), f"the write of {self}")

    def check(self, rig: Rig, window: Window) -> None:
        """Read the tensor. Raises `BrokenRule` if it has other bits."""
        buffer, event = window.read(self.offset, self.shape, self.dtype)
        finish(event, f"the read of {self}")
        expect_form(buffer, self.dtype, self.shape, str(self))
        same(rig.get(buffer), random_array(self.dtype, self.shape, self.seed), str(self))


class Other:
    """The second process, as the check sees it; a context manager.

    It opens the device of that id; by default, the device under test.
    """

    def __init__(self, rig: Rig, device_id: str = "") -> None:
        reference = backend_reference(rig.info.backend)
        if reference is None:
            raise NotAsked("no other process can load a backend of a function or a prompt")
        self._child = Child("hetpipe.conformance.peer", reference, device_id or rig.info.id)

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the answer of a method of `_Peer`. Raises `BrokenRule` if the method fails."""
        with self.during(method, **arguments) as results:
            pass
        return results[0]

    @contextmanager
    def during(self, method: str, **arguments: Any) -> Iterator[list[Any]]:
        """Run a method of `_Peer` during the block; its answer is in the list after the block.

        Raises as `ask` does. If both fail, a failure of the other process that is already known
        is raised, because the block may have waited for that process in vain.
        """
        results: list[Any] = []
        try:
            self._child.send({"method": method, "arguments": arguments})
            try:
                yield results
            except Exception:
                with suppress(ChildLate):
                    self._receive(method, 0.0)
                raise
            results.append(self._receive(method, ANSWER_S))
        except ChildError as error:
            raise BrokenRule(f"in the other process, {method}: {error}") from error

    def _receive(self, method: str, limit_s: float) -> Any:
        answer = self._child.receive(limit_s)
        if skipped := answer.get("skipped"):
            raise NotAsked(skipped)
        if broken := answer.get("broken"):
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
    """The device in the second process, its windows by number, and its group."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._windows: list[Window] = []
        self._groups: list[Group] = []

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

    def join(self, folder: str, alone: bool) -> None:
        group = join(self._rig, Path(folder), 1, alone)
        if group is None:
            raise BrokenRule("join_group returns None here, but a group in the first process")
        self._groups.append(group)

    def sum(self, sums: Sequence[dict[str, Any]]) -> list[str]:
        return sum_all(self._rig, self._groups[-1], 1, [Sum.from_json(each) for each in sums])


def _pieces(pieces: Sequence[dict[str, Any]]) -> list[Piece]:
    return [Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces]


def _answer(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": method(**arguments)}
    except NotAsked as reason:
        return {"skipped": str(reason)}
    except BrokenRule as broken:
        return {"broken": str(broken)}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"}


def main(reference: str, device_id: str) -> None:
    parent = Parent()
    load_reference(reference)
    peer = _Peer(Rig(open_bare(device_id)))
    for request in parent.requests():
        parent.send(_answer(getattr(peer, request["method"]), request["arguments"]))
    os._exit(0)  # skips the driver's exit handlers, which may crash


if __name__ == "__main__":
    main(*sys.argv[1:])
