"""Operator cases: importing the tables fills `CASES`."""

from hetpipe.conformance.cases import (
    attention,
    convolution,
    elementwise,
    networks,
    recurrent,
    shapes,
)
from hetpipe.conformance.cases.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "attention",
    "convolution",
    "elementwise",
    "networks",
    "recurrent",
    "shapes",
]
