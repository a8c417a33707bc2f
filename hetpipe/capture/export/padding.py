"""Pads the tensors of a batch to the length of a bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hetpipe.buckets import Buckets, Size
from hetpipe.errors import HetpipeError
from hetpipe.words import choices

Array = np.ndarray[Any, Any]

MASK = "attention_mask"
IGNORED = -100
"""The label that torch's losses ignore by default."""


class Padding:
    """Pads the leaves of batches whose length varies. `leaves` has the tensors of the example.

    Raises `HetpipeError` if it is unclear which leaves vary, or how to pad one of them.
    """

    def __init__(self, buckets: Buckets, leaves: Mapping[str, Array]) -> None:
        self.buckets = buckets
        self.dims = _dims_of(buckets, leaves)
        """The dimension of each leaf that varies, by name."""
        given = {_name_of(name, leaves, "pad"): value for name, value in buckets.pad.items()}
        for name in given.keys() - self.dims.keys():
            raise HetpipeError(
                f"buckets pad {name}, whose length does not vary: leave it out of pad, or name "
                "its dimension in dim"
            )
        self._values = {
            name: _value_of(name, leaves[name].dtype, given.get(name)) for name in self.dims
        }
        self.assumed = {name for name in self.dims if name[0] == "y" and name not in given}
        """The leaves of y that are padded with `IGNORED` without the user's word."""

    def length_of(self, leaves: Mapping[str, Array]) -> int:
        """Return the length of a batch. Raises `HetpipeError` if leaves differ in length."""
        lengths = {n: int(leaves[n].shape[d]) for n, d in self.dims.items() if n in leaves}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise HetpipeError(
                f"the tensors of a batch differ in their length: {listed}; pad them to one length, "
                "or name only the tensors of one length in dim of the buckets"
            )
        return next(iter(lengths.values()))

    def pad(self, leaves: Mapping[str, Array], length: int = 0) -> dict[str, Array]:
        """Return the leaves, padded to `length` or else to the smallest bucket that holds them."""
        own = self.length_of(leaves)
        bucket = self.buckets.holding(own)
        missing = (length or bucket) - own
        padded = dict(leaves)
        for name in self.dims.keys() & leaves.keys() if missing else ():
            widths = [(0, 0)] * leaves[name].ndim
            widths[self.dims[name]] = (0, missing)
            padded[name] = np.pad(leaves[name], widths, constant_values=self._values[name])
        return padded

    def size(self, samples: int, length: int) -> int:
        """Return the size of `samples` in the bucket of this length."""
        return samples if length == self.buckets.largest else Size(samples, length)

    def length(self, size: int) -> int:
        """Return the length of a batch of this size."""
        return size.length if isinstance(size, Size) else self.buckets.largest

    def another(self, size: int) -> int:
        """Return a size with another length: the nearest bucket's, or one less."""
        own = self.length(size)
        others = [length for length in self.buckets.lengths if length != own]
        near = min(others, key=lambda length: abs(length - own), default=own - 1)
        return self.size(int(size), near)

    @property
    def values(self) -> dict[str, Any]:
        """The value with which each leaf is padded that varies."""
        return {name: value.item() for name, value in self._values.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The lengths, dimensions and values, as JSON values."""
        return {"lengths": list(self.buckets.lengths), "dims": self.dims, "pad": self.values}

    @property
    def text(self) -> str:
        """The buckets and the leaves that vary, in words."""
        lengths = ", ".join(map(str, self.buckets.lengths))
        leaves = ", ".join(f"{name} (dimension {dim})" for name, dim in self.dims.items())
        return (
            f"batches are padded to a length of {lengths} in {leaves}; times and memory are for "
            f"{self.buckets.largest}"
        )


def _dims_of(buckets: Buckets, leaves: Mapping[str, Array]) -> dict[str, int]:
    """Return the dimension of each leaf that varies."""
    if isinstance(buckets.dim, Mapping):
        dims = {_name_of(name, leaves, "dim"): dim for name, dim in buckets.dim.items()}
        for name, dim in dims.items():
            if leaves[name].ndim <= dim:
                raise HetpipeError(
                    f"buckets have dimension {dim} of {name}, which has only dimensions 0 to "
                    f"{leaves[name].ndim - 1} in the example batch: give another dimension"
                )
    else:
        able = {name: leaf.shape[buckets.dim] for name, leaf in leaves.items()
                if leaf.ndim > buckets.dim}  # fmt: skip
        lengths = {name: length for name, length in able.items() if name[0] == "x"}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise HetpipeError(
                f"the tensors of x differ in dimension {buckets.dim}: {listed}; name the tensors "
                "whose length varies, as hp.Buckets(lengths, dim={'x': 1})"
            )
        dims = dict.fromkeys((n for n in able if able[n] in lengths.values()), buckets.dim)
    if not any(name[0] == "x" for name in dims):
        raise HetpipeError(
            f"no tensor of x has the dimension {buckets.dim} of the buckets: the example batch "
            f"holds {', '.join(f'{name} {leaf.shape}' for name, leaf in leaves.items())}"
        )
    return dims


def _name_of(asked: str, leaves: Collection[str], option: str) -> str:
    """Return the leaf with this name, or whose name ends so."""
    found = [name for name in leaves if name == asked] or [
        name for name in leaves if name.rpartition(".")[2] == asked
    ]
    if len(found) != 1:
        known = (
            f"means {' or '.join(found)}" if found else f"is no tensor; {choices(asked, leaves)}"
        )
        raise HetpipeError(f"{option} of the buckets names {asked!r}, which {known}")
    return found[0]


def _value_of(name: str, dtype: np.dtype[Any], given: float | None) -> Any:
    """Return the value with which a leaf is padded."""
    if given is None:
        integers = dtype.kind in "iu"
        if name[0] == "x" and (integers or (name.endswith(MASK) and dtype.kind == "b")):
            given = 0
        elif name[0] == "y" and dtype.kind == "i":
            given = IGNORED
        else:
            raise HetpipeError(
                f"buckets must pad {name}, a tensor of {dtype}, and no value is known for it: give "
                f"one, as hp.Buckets(lengths, pad={{{name!r}: 0}})"
            )
    try:
        value = np.array(given).astype(dtype)
        fits = bool(value == given) or given != given
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise HetpipeError(f"buckets pad {name} with {given!r}, which {dtype} cannot hold")
    return value
