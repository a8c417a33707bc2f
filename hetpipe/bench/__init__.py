"""Workloads, and the benchmark of unlike devices against their sum."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__, {"Workload": "workload", "ZOO": "zoo", "load_workload": "zoo"}
)
