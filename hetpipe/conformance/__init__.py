"""Conformance suite: checks with which backend authors test their backends."""
