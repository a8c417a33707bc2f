"""Importing the modules of checks fills `CHECKS`, but for those of torch's own database."""

from hetpipe.conformance import (
    buffers,
    contract,
    copies,
    events,
    held,
    lengths,
    operators,
    threads,
    training,
)

__all__ = [
    "buffers", "contract", "copies", "events", "held", "lengths", "operators", "threads",
    "training",
]  # fmt: skip
