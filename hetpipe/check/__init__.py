"""Judges numbers: float64 references, tolerances, rounding noise, differences, faulty operators."""
