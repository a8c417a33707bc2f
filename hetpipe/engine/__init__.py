"""Runs plans: workers, their transports, weight policies, and the controller's side of them."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Crew": "crew",
        "StepRequest": "crew",
        "StepResult": "crew",
        "measure_empty_action": "overhead",
    },
)
