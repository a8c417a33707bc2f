"""Conformance suite: checks by which authors test their backends."""
