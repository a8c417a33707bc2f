"""What a stage holds on its device: micro-batches in flight, and the bytes of distinct buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hetpipe.sdk.backend import Buffer

Pass = tuple[int, int]
"""Samples of the micro-batch, and which of its passes: 0 is the forward."""


class Held(NamedTuple):
    """What a frame holds; `in_flight` is 1 if a later backward reads any of it, else 0."""

    nbytes: int
    in_flight: int


class Memory:
    """Counts behind every pass and update; knows the most since it was last asked.

    Behind a pass nothing is dropped yet, so its gradients count as well as what they are made of.
    What a program needs while it runs and what transfers hold do not count. Shapes are static: what
    a frame holds is added up once for every micro-batch size and pass, behind it and then while the
    frame waits for the next one.
    """

    def __init__(self, buffers: Iterable[Buffer | None], version_nbytes: int) -> None:
        """`buffers` stay; every version of the weights but the first is `version_nbytes` more."""
        self._steady_nbytes = nbytes_of(buffers)
        self._version_nbytes = version_nbytes
        self._versions = 1
        self._known: dict[tuple[Pass, bool], Held] = {}
        self._latest: tuple[int, Pass, Sequence[Buffer | None], Collection[int]] | None = None
        self._frames: dict[int, Held] = {}  # by micro-batch, but for the latest
        self._nbytes = self._in_flight = 0  # of these frames
        self._most_in_flight = self._peak_nbytes = 0

    def stay(self, buffer: Buffer) -> None:
        """One more buffer stays."""
        self._steady_nbytes += buffer.nbytes

    def passed(
        self,
        microbatch: int,
        which: Pass,
        frame: Sequence[Buffer | None],
        awaited: Collection[int],
        versions: int,
    ) -> None:
        """A pass has run; of its frame, later backwards read what is `awaited`."""
        self.forget(microbatch)
        self._versions = versions
        self._reach(self._look(which, True, frame, awaited))
        self._latest = (microbatch, which, frame, awaited)

    def updated(self, versions: int) -> None:
        """An update has run."""
        self._settle()
        self._versions = versions
        self._reach(Held(0, 0))

    def forget(self, microbatch: int) -> None:
        """The frame of a micro-batch goes, or changes."""
        self._settle()
        held = self._frames.pop(microbatch, None)
        if held is not None:
            self._nbytes -= held.nbytes
            self._in_flight -= held.in_flight

    def take(self) -> tuple[int, int]:
        """The most micro-batches in flight, and the most bytes, since the last call."""
        self._settle()
        most = self._most_in_flight, self._peak_nbytes
        self._most_in_flight = self._peak_nbytes = 0
        self._reach(Held(0, 0))
        return most

    def _settle(self) -> None:
        """The latest frame has dropped what nobody reads any more, and sent what it had to."""
        if self._latest is not None:
            microbatch, which, frame, awaited = self._latest
            self._frames[microbatch] = held = self._look(which, False, frame, awaited)
            self._nbytes += held.nbytes
            self._in_flight += held.in_flight
            self._latest = None

    def _reach(self, held: Held) -> None:
        nbytes = self._steady_nbytes + (self._versions - 1) * self._version_nbytes + self._nbytes
        self._most_in_flight = max(self._most_in_flight, self._in_flight + held.in_flight)
        self._peak_nbytes = max(self._peak_nbytes, nbytes + held.nbytes)

    def _look(
        self, which: Pass, behind: bool, frame: Sequence[Buffer | None], awaited: Collection[int]
    ) -> Held:
        held = self._known.get((which, behind))
        if held is None:
            in_flight = any(frame[index] is not None for index in awaited)
            held = self._known[which, behind] = Held(nbytes_of(frame), int(in_flight))
        return held


def nbytes_of(buffers: Iterable[Buffer | None]) -> int:
    """Bytes of these buffers, each counted once."""
    distinct = {id(buffer): buffer for buffer in buffers if buffer is not None}
    return sum(buffer.nbytes for buffer in distinct.values())
