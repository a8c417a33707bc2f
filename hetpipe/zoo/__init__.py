"""Workloads by name: models, their losses and their data."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.zoo.load import load_workload as load_workload
    from hetpipe.zoo.workload import Workload as Workload
else:
    __getattr__, __dir__ = lazy(__name__)
