"""Cost tables of earlier versions: reads them as tables of this version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER = (1, 2)
"""Earlier versions that can be read. Both lack `sum_speed`; version 1 also lacks probes and
spreads."""


def upgraded(data: Any, version: int) -> Any:
    """Return a table of an earlier version in the form of this version; other data unchanged."""
    if not isinstance(data, Mapping):
        return data
    data = {"contention": 0.0, "trains": True, "whole_loss": {}, **data}
    if isinstance(links := data.get("links"), (list, tuple)):
        usual = {"copying": 0.5, "media": []}  # of links that were measured before these existed
        data["links"] = [{**usual, **one} if isinstance(one, Mapping) else one for one in links]
    if data.get("version") not in EARLIER:
        return data
    new: dict[str, Any] = {"version": version}
    if isinstance(links := data.get("links"), (list, tuple)):
        new["links"] = _each_with(links, sum_speed=1.0)
    if data["version"] == 1 and isinstance(devices := data.get("devices"), Mapping):
        more = {"spread": 0.0, "alone": 1.0, "probe": None, "probe_alone": None}
        costs = [
            {**cost, "layers": _each_with(cost.get("layers"), spread=0.0), **more}
            if isinstance(cost, Mapping)
            else cost
            for cost in devices.values()
        ]
        new["devices"] = dict(zip(devices, costs, strict=True))
    return {**data, **new}


def _each_with(entries: Any, **new: float) -> Any:
    """Return a list of records with the fields `new` added; anything else unchanged."""
    if not isinstance(entries, (list, tuple)):
        return entries
    return [{**one, **new} if isinstance(one, Mapping) else one for one in entries]
