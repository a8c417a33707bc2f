"""Checkpoints on disk: all that a training needs to go on, whatever plan and devices run it."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "load": "checkpoint",
        "save": "checkpoint",
    },
)
