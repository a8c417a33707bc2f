"""Checkpoints on disk: a complete training state, for any plan and any devices."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "load": "checkpoint",
        "save": "checkpoint",
    },
)
