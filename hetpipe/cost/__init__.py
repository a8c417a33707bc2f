"""Costs: the table of layers, devices and links, and its file."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "CostTable": "table",
        "DeviceCost": "table",
        "Drift": "probe",
        "LayerBytes": "table",
        "LayerCost": "table",
        "LinkCost": "table",
        "Probe": "probe",
        "TiedBytes": "table",
        "read_costs": "file",
    },
)
