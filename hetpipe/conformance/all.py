"""Importing the modules of checks fills `CHECKS`, but for those of torch's own database."""

from hetpipe.conformance import buffers, contract, events, held, operators, training

__all__ = ["buffers", "contract", "events", "held", "operators", "training"]
