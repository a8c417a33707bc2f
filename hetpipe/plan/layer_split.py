"""Splits: layers that a plan divides in two, so that neighbouring stages share their work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetpipe.errors import PlanError
from hetpipe.records import Positive


@dataclass(frozen=True)
class Split:
    """A linear layer or convolution that is split by output channels (BaPipe, section 3.3.2).

    The first part of `layer` computes its first `channels` output channels. The second part
    computes the others from the layer's input, and joins both.
    """

    layer: str
    channels: Positive

    @property
    def layers(self) -> tuple[str, str]:
        """The names of the two parts."""
        return f"{self.layer}[:{self.channels}]", f"{self.layer}[{self.channels}:]"


def splits_of(channels: Mapping[str, int] | None) -> tuple[Split, ...]:
    """Return the splits of layers by name; empty for None. Raises `PlanError` for other values."""
    if channels is None:
        return ()
    if not isinstance(channels, Mapping):
        raise PlanError(f"split={channels!r}: give channels by layer, as {{'fc1': 96}}")
    for layer, count in channels.items():
        if not isinstance(layer, str) or type(count) is not int or count < 1:
            raise PlanError(
                f"split={{{layer!r}: {count!r}}}: give a layer's name and the output channels of "
                "its first part, a whole number of 1 or more"
            )
    return tuple(Split(layer, count) for layer, count in channels.items())


def channels_of(splits: Iterable[Split]) -> dict[str, int]:
    """Return the channels of the first part, by layer."""
    return {split.layer: split.channels for split in splits}
