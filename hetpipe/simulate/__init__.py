"""Simulation: a schedule on a virtual clock gives a timeline."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Span": "timeline",
        "StageTimes": "times",
        "Timeline": "timeline",
        "Transfer": "times",
        "simulate": "simulator",
    },
)
