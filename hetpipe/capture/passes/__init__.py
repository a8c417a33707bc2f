"""Passes: a flat graph becomes pieces, and each piece the programs of a stage."""
