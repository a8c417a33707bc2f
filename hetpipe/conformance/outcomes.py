"""Outcomes of a check other than success, as exceptions."""

from __future__ import annotations


class BrokenRule(Exception):
    """The device has broken the rule of a check; the message describes the observation."""


class NotAsked(Exception):
    """The check does not apply to this device; the message gives the reason."""
