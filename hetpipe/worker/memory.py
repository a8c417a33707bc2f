"""Counts the memory of a stage: micro-batches in flight, and bytes of distinct buffers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hetpipe.sdk.backend import Buffer
from hetpipe.wire.wire import Content

Pass = tuple[int, int | Content]
"""Samples of the micro-batch, and the number of the pass: 0 is the forward. A forward in eval mode
has its content instead."""


class Held(NamedTuple):
    """The bytes of a frame; `in_flight` is 1 if a later backward reads the frame, else 0."""

    nbytes: int
    in_flight: int


class _Latest(NamedTuple):
    """The latest pass of a thread."""

    microbatch: int
    which: Pass
    frame: Sequence[Buffer | None]
    awaited: Collection[int]


class Memory:
    """Counts memory after every pass and update, and knows the maximum since the last query.

    Right after a pass nothing is dropped yet, so its inputs count as well as its outputs. The
    memory of running programs and of transfers does not count. Shapes are static, so two sizes of a
    frame are computed once for each `Pass`: the size right after the pass, and the size while the
    frame waits for the next pass. A lane's next pass replaces the first size of its latest frame
    by the second.
    """

    def __init__(self, buffers: Iterable[Buffer | None], late_nbytes: int) -> None:
        """Start with the lasting `buffers`. Late gradients count at all times, as in plans."""
        self._steady_nbytes = nbytes_of(buffers) + late_nbytes
        self._version_nbytes = 0  # which each further version adds
        self._versions = 1
        self._borrowed_nbytes = 0
        self._sizes: dict[tuple[Pass, bool], Held] = {}  # True: right after the pass
        self._lock = threading.Lock()
        self._latest: dict[int, _Latest] = {}  # by thread
        self._frames: dict[int, Held] = {}  # by micro-batch, without frames in `_latest`
        self._nbytes = self._in_flight = 0  # sums over `_frames`
        self._most_in_flight = self._peak_nbytes = 0

    def stay(self, buffer: Buffer, *, versioned: bool) -> None:
        """Count a lasting buffer; each version of the weights has another `versioned` one."""
        self._steady_nbytes += buffer.nbytes
        self._version_nbytes += buffer.nbytes if versioned else 0

    def borrows(self, versions: Collection[Sequence[Buffer]]) -> None:
        """Count the parameters of other stages that mini-batches borrow. One of these versions is
        present, so it counts already."""
        with self._lock:
            nbytes = [nbytes_of(version) for version in versions]
            self._borrowed_nbytes = sum(nbytes[1:])
            self._reach(Held(0, 0))

    def passed(
        self,
        microbatch: int,
        which: Pass,
        frame: Sequence[Buffer | None],
        awaited: Collection[int],
        versions: int,
    ) -> None:
        """Record a pass; later backwards read the `awaited` entries of its frame."""
        with self._lock:
            self._forget(microbatch)
            self._versions = versions
            self._reach(self._look(which, True, frame, awaited))
            self._latest[threading.get_ident()] = _Latest(microbatch, which, frame, awaited)

    def updated(self, versions: int) -> None:
        with self._lock:
            self._settle(*self._latest)
            self._versions = versions
            self._reach(Held(0, 0))

    def forget(self, microbatch: int) -> None:
        """Forget the frame of a micro-batch, which is dropped or will change."""
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
        """Return the most micro-batches in flight, and the most bytes, since the last call."""
        with self._lock:
            self._settle(*self._latest)
            most = self._most_in_flight, self._peak_nbytes
            self._most_in_flight = self._peak_nbytes = 0
            self._reach(Held(0, 0))
            return most

    def _settle(self, *threads: int) -> None:
        """Count these threads' latest frames again, after unread values were dropped."""
        for thread in threads:
            if (latest := self._latest.pop(thread, None)) is not None:
                held = self._look(latest.which, False, latest.frame, latest.awaited)
                self._frames[latest.microbatch] = held
                self._nbytes += held.nbytes
                self._in_flight += held.in_flight

    def _reach(self, held: Held) -> None:
        """Record the total with `held` added. The frames of other lanes' passes change, so they are
        counted now."""
        running = [_count(other.frame, other.awaited) for other in self._latest.values()]
        nbytes = self._steady_nbytes + (self._versions - 1) * self._version_nbytes + self._nbytes
        nbytes += self._borrowed_nbytes
        in_flight = self._in_flight + sum(other.in_flight for other in running)
        self._most_in_flight = max(self._most_in_flight, in_flight + held.in_flight)
        nbytes += sum(other.nbytes for other in running)
        self._peak_nbytes = max(self._peak_nbytes, nbytes + held.nbytes)

    def _look(
        self,
        which: Pass,
        fresh: bool,
        frame: Sequence[Buffer | None],
        awaited: Collection[int],
    ) -> Held:
        held = self._sizes.get((which, fresh))
        if held is None:
            held = self._sizes[which, fresh] = _count(frame, awaited)
        return held


def _count(frame: Sequence[Buffer | None], awaited: Collection[int]) -> Held:
    in_flight = any(frame[index] is not None for index in awaited)
    return Held(nbytes_of(frame), int(in_flight))


def nbytes_of(buffers: Iterable[Buffer | None]) -> int:
    """Return the bytes of these buffers, each counted once."""
    distinct = {id(buffer): buffer for buffer in buffers if buffer is not None}
    return sum(buffer.nbytes for buffer in distinct.values())
