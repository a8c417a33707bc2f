"""Numerical checks: float64 references, tolerances, rounding noise, search for faulty operators."""
