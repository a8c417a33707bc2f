"""Optimizers: pure update rules that every backend runs."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Optimizer": "rule",
        "adagrad": "squares",
        "adam": "rules",
        "adamw": "rules",
        "check_optimizer": "check",
        "lamb": "published",
        "lion": "published",
        "multi_step": "rule",
        "rmsprop": "squares",
        "sgd": "rules",
    },
)
