"""Callbacks of `Pipeline.fit`: objects that the loop calls after each mini-batch and epoch."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.callbacks.base import Callback as Callback
    from hetpipe.callbacks.base import State as State
    from hetpipe.callbacks.history import Epoch as Epoch
    from hetpipe.callbacks.history import History as History
    from hetpipe.callbacks.monitors import BestCheckpoint as BestCheckpoint
    from hetpipe.callbacks.monitors import EarlyStopping as EarlyStopping
    from hetpipe.callbacks.progress import Progress as Progress
    from hetpipe.callbacks.rows import CSV as CSV
    from hetpipe.callbacks.trackers import MLflow as MLflow
    from hetpipe.callbacks.trackers import TensorBoard as TensorBoard
    from hetpipe.callbacks.trackers import WandB as WandB
else:
    __getattr__, __dir__ = lazy(__name__)
