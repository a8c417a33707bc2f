"""Keeps the versions of shared parameters that mini-batches use under an asynchronous schedule.

With each mini-batch the owner of a shared parameter sends the version that its forward of the first
micro-batch uses. The other stages borrow this version for all passes of the mini-batch, and give it
back after their update. So the version at every end is the owner's.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.wire.messages import Keep
from hetpipe.worker.memory import Memory
from hetpipe.worker.weights import Version, Weights


class Loans:
    """The loans of one stage. `entries` are the indices, in a version, of the parameters that
    earlier stages own."""

    def __init__(
        self, weights: Weights, entries: Sequence[int], memory: Memory, keep: Keep
    ) -> None:
        self.streams = not keep.policy.flushes
        """Whether the schedule is asynchronous."""
        self._weights, self._entries, self._memory = weights, entries, memory
        self._chosen: dict[int, Version] = {}  # by mini-batch
        self._borrowed: dict[int, Version] = {}  # by mini-batch, only the entries

    def choose(self, mini_batch: int, microbatch: int, lag: int, ahead: int) -> None:
        """Choose the version of a mini-batch's first micro-batch, whose forward comes next."""
        if mini_batch not in self._chosen:
            self._chosen[mini_batch] = self._weights.forward(microbatch, lag, ahead)

    def chosen(self, mini_batch: int) -> Version:
        """Return the version to lend for a mini-batch; after a flush, the present version."""
        return self._chosen.get(mini_batch, self._weights.present)

    def forward(self, mini_batch: int, microbatch: int, lag: int, ahead: int) -> Version:
        """Return the version for a forward, see `Weights.forward`."""
        version = self._chosen.pop(mini_batch, None)
        return self._weights.forward(microbatch, lag, ahead) if version is None else version

    def borrow(self, mini_batch: int) -> None:
        """Let the passes of a mini-batch use the parameters that have just arrived."""
        self._borrowed[mini_batch] = [self._weights.present[entry] for entry in self._entries]
        self._memory.borrows(self._borrowed.values())

    def give_back(self, mini_batch: int) -> None:
        """Forget the parameters that the mini-batch has borrowed, if any."""
        if self._borrowed.pop(mini_batch, None) is not None:
            self._memory.borrows(self._borrowed.values())

    def complete(self, version: Version, mini_batch: int) -> Version:
        """Return the version with the parameters that the mini-batch has borrowed."""
        if mini_batch not in self._borrowed:
            return version
        version = list(version)
        for entry, buffer in zip(self._entries, self._borrowed[mini_batch], strict=True):
            version[entry] = buffer
        return version

    def drop(self, version: Version) -> None:
        """Drop the shared parameters of an old version: passes that use it have borrowed them."""
        for entry in self._entries:
            version[entry] = None
