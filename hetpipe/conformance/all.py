"""All modules of checks: importing this module fills `CHECKS`, except for torch's database."""

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
