"""Weight policies: which version of the parameters each pass of a stage uses."""

from __future__ import annotations

from hetpipe.sdk.backend import Buffer


class FlushPolicy:
    """One version: all passes of a mini-batch use it, then the update replaces it (GPipe, DAPPLE).

    The stage asks for the list of parameter buffers; the order is that of its parameter names.
    """

    donates = True
    """Whether an update may overwrite the parameters that it reads: no other version lives."""

    def __init__(self, parameters: list[Buffer]) -> None:
        self._parameters = parameters

    def forward(self, microbatch: int) -> list[Buffer]:
        """What the forward of `microbatch` reads."""
        return self._parameters

    def backward(self, microbatch: int) -> list[Buffer]:
        """What the backward of `microbatch` reads."""
        return self._parameters

    def newest(self) -> list[Buffer]:
        """What an update reads, and where its results are filed."""
        return self._parameters
