"""Workloads by name: models, their losses and their data."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__, {"Workload": "workload", "ZOO": "load", "load_workload": "load"}
)
