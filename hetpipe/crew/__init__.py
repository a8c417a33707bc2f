"""The controller of the workers: starts them, gives each its stages, hands out mini-batches."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__, {"Crew": "crew", "StepRequest": "request", "StepResult": "request"}
)
