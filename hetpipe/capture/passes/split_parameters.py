"""Translates split parameters: two parameters in the graphs are one for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hetpipe.optim.rule import Optimizer

Array = np.ndarray[Any, Any]


def part_names(name: str, rows: int) -> tuple[str, str]:
    """Return the names of the first `rows` rows of a tensor, and of its other rows."""
    return f"{name}[:{rows}]", f"{name}[{rows}:]"


class SplitParameters:
    """Translates between the names of a model and the names of its graphs.

    `rows` has the number of rows in the first part of each split parameter. A gradient has the name
    of its parameter, and optimizer state the name "slot/parameter". Both are split like the
    parameter.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows = dict(rows)
        self._whole = {part: name for name in rows for part in part_names(name, rows[name])}

    def whole(self, name: str) -> str:
        """Return the model's name for a name in the graphs."""
        parameter = _parameter(name, self._whole)
        return name.removesuffix(parameter) + self._whole.get(parameter, parameter)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names in the graphs for a name in the model."""
        rows = self.rows.get(_parameter(name, self.rows))
        return (name,) if rows is None else part_names(name, rows)

    def split(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Convert values by the model's names to values by the graphs' names."""
        parts: dict[str, Array] = {}
        for name, value in values.items():
            rows = self.rows.get(_parameter(name, self.rows))
            pieces = [value] if rows is None else np.split(np.atleast_1d(value), [rows])
            parts.update(zip(self.names(name), pieces, strict=True))
        return parts

    def join(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Convert values by the graphs' names to values by the model's names."""
        joined: dict[str, Array] = {}
        for whole in dict.fromkeys(map(self.whole, values)):
            pieces = [values[name] for name in self.names(whole)]
            joined[whole] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined

    def rules(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer for the graphs' names: a part decays if its parameter does."""
        picks = optimizer.decay_exclude
        if picks is None or not self.rows:
            return optimizer
        return replace(optimizer, decay_exclude=_pick_parts(picks, self.whole))


def _parameter(name: str, known: Mapping[str, object]) -> str:
    """Return the parameter, among the known ones, that a value with this name belongs to."""
    return name if name in known else name.rpartition("/")[2]


def _pick_parts(picks: Callable[[str], bool], whole: Callable[[str], str]) -> Callable[[str], bool]:
    def picks_part(name: str) -> bool:
        return picks(whole(name))

    return picks_part
