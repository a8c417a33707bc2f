"""Capture: a model and an example batch become layers, and layers become stage graphs."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Captured": "captured",
        "Layer": "layers",
        "LayerGraph": "layers",
        "PassPrograms": "program",
        "Program": "program",
        "Slot": "program",
        "StageGraphs": "program",
        "capture": "captured",
    },
)
