"""What a stage holds on its device: micro-batches in flight, and the bytes of distinct buffers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hetpipe.sdk.backend import Buffer

Pass = tuple[int, int]
"""Samples of the micro-batch, and which of its passes: 0 is the forward."""


class Held(NamedTuple):
    """What a frame holds; `in_flight` is 1 if a later backward reads any of it, else 0."""

    nbytes: int
    in_flight: int


class _Latest(NamedTuple):
    """The latest pass of a thread."""

    microbatch: int
    which: Pass
    frame: Sequence[Buffer | None]
    awaited: Collection[int]


class Memory:
    """Counts behind every pass and update; knows the most since it was last asked.

    Behind a pass nothing is dropped yet, so its gradients count as well as what they are made of.
    What a program needs while it runs and what transfers hold do not count. Shapes are static: what
    a frame holds is added up once for every micro-batch size and pass, behind it and then while the
    frame waits for the next one. Lanes pass on threads of their own, and each settles what is its.
    """

    def __init__(self, buffers: Iterable[Buffer | None], version_nbytes: int) -> None:
        """`buffers` stay; every version of the weights but the first is `version_nbytes` more."""
        self._steady_nbytes = nbytes_of(buffers)
        self._version_nbytes = version_nbytes
        self._versions = 1
        self._known: dict[tuple[Pass, bool], Held] = {}
        self._lock = threading.Lock()
        self._latest: dict[int, _Latest] = {}  # by thread
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
        with self._lock:
            self._forget(microbatch)
            self._versions = versions
            self._reach(self._look(which, True, frame, awaited))
            self._latest[threading.get_ident()] = _Latest(microbatch, which, frame, awaited)

    def updated(self, versions: int) -> None:
        """An update has run."""
        with self._lock:
            self._settle(*self._latest)
            self._versions = versions
            self._reach(Held(0, 0))

    def forget(self, microbatch: int) -> None:
        """The frame of a micro-batch goes, or changes."""
        with self._lock:
            self._forget(microbatch)

    def _forget(self, microbatch: int) -> None:
        of_it = [thread for thread, last in self._latest.items() if last.microbatch == microbatch]
        self._settle(threading.get_ident(), *of_it)
        held = self._frames.pop(microbatch, None)
        if held is not None:
            self._nbytes -= held.nbytes
            self._in_flight -= held.in_flight

    def take(self) -> tuple[int, int]:
        """The most micro-batches in flight, and the most bytes, since the last call."""
        with self._lock:
            self._settle(*self._latest)
            most = self._most_in_flight, self._peak_nbytes
            self._most_in_flight = self._peak_nbytes = 0
            self._reach(Held(0, 0))
            return most

    def _settle(self, *threads: int) -> None:
        """Their latest frames have dropped what nobody reads, and sent what they had to."""
        for thread in threads:
            if (latest := self._latest.pop(thread, None)) is not None:
                held = self._look(latest.which, False, latest.frame, latest.awaited)
                self._frames[latest.microbatch] = held
                self._nbytes += held.nbytes
                self._in_flight += held.in_flight

    def _reach(self, held: Held) -> None:
        """This is held on top of all frames; those of other lanes may just be changing."""
        others = [_look_at(other.frame, other.awaited) for other in self._latest.values()]
        nbytes = self._steady_nbytes + (self._versions - 1) * self._version_nbytes + self._nbytes
        in_flight = self._in_flight + sum(other.in_flight for other in others)
        self._most_in_flight = max(self._most_in_flight, in_flight + held.in_flight)
        nbytes += sum(other.nbytes for other in others)
        self._peak_nbytes = max(self._peak_nbytes, nbytes + held.nbytes)

    def _look(
        self, which: Pass, behind: bool, frame: Sequence[Buffer | None], awaited: Collection[int]
    ) -> Held:
        held = self._known.get((which, behind))
        if held is None:
            held = self._known[which, behind] = _look_at(frame, awaited)
        return held


def _look_at(frame: Sequence[Buffer | None], awaited: Collection[int]) -> Held:
    in_flight = any(frame[index] is not None for index in awaited)
    return Held(nbytes_of(frame), int(in_flight))


def nbytes_of(buffers: Iterable[Buffer | None]) -> int:
    """Bytes of these buffers, each counted once."""
    distinct = {id(buffer): buffer for buffer in buffers if buffer is not None}
    return sum(buffer.nbytes for buffer in distinct.values())
