"""Optimizers: pure update rules that every backend runs."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {"Optimizer": "rule", "adam": "rules", "adamw": "rules", "sgd": "rules"},
)
