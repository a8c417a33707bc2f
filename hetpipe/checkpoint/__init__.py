"""Checkpoints on disk: a complete training state, for any plan and any devices."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.checkpoint.checkpoint import Checkpoint as Checkpoint
    from hetpipe.checkpoint.checkpoint import save as save
    from hetpipe.checkpoint.series import load as load
else:
    __getattr__, __dir__ = lazy(__name__)
