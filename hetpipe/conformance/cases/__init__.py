"""Operator cases: the import of this package fills `CASES`."""

from importlib import import_module

from hetpipe.conformance.cases.case import CASES, Case

__all__ = ["CASES", "Case"]

for _table in ("attention", "convolution", "elementwise", "networks", "recurrent", "shapes"):
    import_module(f"hetpipe.conformance.cases.{_table}")
