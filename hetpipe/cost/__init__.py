"""Costs: the table of layers, devices and links, and its file."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.cost.importers import read_costs as read_costs
    from hetpipe.cost.table import CostTable as CostTable
else:
    __getattr__, __dir__ = lazy(__name__)
