"""All operator cases: importing the tables fills `CASES`."""

import operator_cases_attention
import operator_cases_elementwise
import operator_cases_networks
import operator_cases_recurrent
import operator_cases_shapes
from operator_case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "operator_cases_attention",
    "operator_cases_elementwise",
    "operator_cases_networks",
    "operator_cases_recurrent",
    "operator_cases_shapes",
]
