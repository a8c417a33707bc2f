"""Buckets: the few lengths to which batches of varying length are padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hetpipe.errors import HetpipeError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Buckets:
    """The lengths to which batches are padded, in dimension `dim` of the tensors that vary.

    With a number as `dim`, every tensor varies that has the example's length in this dimension. A
    dict names the tensors that vary, and the dimension of each: `{"x.input_ids": 1}`. `pad` has the
    value with which a tensor is padded, by name. A name may be the end of a tensor's name, as
    `input_ids`. Without `pad`, integers of x are padded with 0, masks named `attention_mask` of
    integers or bools too, and integers of y with -100; any other tensor needs a value. Raises
    `HetpipeError`.
    """

    lengths: Sequence[int]
    dim: int | Mapping[str, int] = 1
    pad: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(_checked(self.lengths)))
        named = self.dim if isinstance(self.dim, Mapping) else {"": self.dim}
        for name, dim in named.items():
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
                raise HetpipeError(
                    f"buckets have dim={dim!r}{' for ' + name if name else ''}: give the number of "
                    "one dimension, 1 or more; dimension 0 is the samples, and a mask of length x "
                    "length must be made in the model"
                )
        if not named:
            raise HetpipeError("buckets have dim={}: name a tensor whose length varies")
        if not isinstance(self.pad, Mapping):
            raise HetpipeError(
                f"buckets have pad={self.pad!r}: give a dict of values by tensor, as {{'y': -100}}"
            )

    @classmethod
    def of(cls, value: Buckets | Sequence[int]) -> Buckets:
        """Return `value`, or the buckets of these lengths."""
        return value if isinstance(value, Buckets) else cls(value)

    @property
    def largest(self) -> int:
        """The largest length."""
        return self.lengths[-1]

    def holding(self, length: int) -> int:
        """Return the smallest bucket for a length. Raises `HetpipeError` if all are too small."""
        if length > self.largest:
            raise HetpipeError(
                f"length {length} is above the largest bucket, {self.largest}: cut the samples to "
                f"{self.largest}, or give a larger bucket, as buckets="
                f"{[*self.lengths, length]}"
            )
        return next(bucket for bucket in self.lengths if bucket >= length)


class Size(int):
    """A number of samples whose batch has another length than the largest bucket.

    Sizes are keys of programs and messages. In the largest bucket, or without buckets, a size is a
    plain integer.
    """

    length: int

    def __new__(cls, samples: int, length: int) -> Size:
        size = super().__new__(cls, samples)
        size.length = length
        return size

    @property
    def parts(self) -> tuple[int, int]:
        """The number of samples, and the length."""
        return int(self), self.length

    def __reduce__(self) -> tuple[type[Size], tuple[int, int]]:
        return Size, self.parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.parts == other.parts

    def __ne__(self, other: object) -> bool:
        return not self == other  # otherwise int compares

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"Size{self.parts}"

    def __str__(self) -> str:
        return f"{int(self)} (length {self.length})"


def like(samples: int, size: int) -> int:
    """Return a number of samples in the bucket of `size`."""
    return Size(int(samples), size.length) if isinstance(size, Size) else int(samples)


class BucketBatches:
    """A batch sampler that puts samples of like length together, for torch's `DataLoader`.

    `sample_lengths` has the length of every sample, and `buckets` the lengths of the buckets. Each
    pass over the object is an epoch: it yields lists of `batch_size` indices, every sample once, in
    a new order. The last samples of a bucket may join the next larger one, so only the last batch
    may be smaller; `drop_last` leaves it out. Raises `HetpipeError` for a sample that no bucket
    holds.
    """

    def __init__(
        self,
        sample_lengths: Sequence[int],
        buckets: Buckets | Sequence[int],
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        import torch

        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise HetpipeError(f"batch_size={batch_size!r}: give a whole number of 1 or more")
        kinds = Buckets.of(buckets)
        self._by_bucket: dict[int, list[int]] = {bucket: [] for bucket in kinds.lengths}
        for index, length in enumerate(sample_lengths):
            try:
                self._by_bucket[kinds.holding(length)].append(index)
            except HetpipeError as error:
                raise HetpipeError(f"sample {index}: {error}") from None
        self._count, self._batch_size = len(sample_lengths), batch_size
        self._drop_last = drop_last
        self.generator = torch.Generator().manual_seed(seed)
        """Decides the order; its state is the state of the sampler."""

    def __len__(self) -> int:
        whole, rest = divmod(self._count, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = []
        rest: list[int] = []
        for indices in self._by_bucket.values():
            own = rest + self._shuffled(indices)
            whole = len(own) // self._batch_size * self._batch_size
            batches += [own[lo : lo + self._batch_size] for lo in range(0, whole, self._batch_size)]
            rest = own[whole:]
        batches = self._shuffled(batches)
        if rest and not self._drop_last:
            batches.append(rest)
        return iter(batches)

    def _shuffled(self, items: Sequence[_T]) -> list[_T]:
        import torch

        order = torch.randperm(len(items), generator=self.generator).tolist()
        return [items[index] for index in order]


def _checked(lengths: object) -> list[int]:
    """Return the lengths in ascending order. Raises `HetpipeError` unless they can be buckets."""
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Sequence) or not lengths:
        raise HetpipeError(f"buckets={lengths!r}: give a list of lengths, as [64, 128, 256]")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise HetpipeError(f"a bucket has length {length!r}: give whole numbers of 1 or more")
    if len(set(lengths)) < len(lengths):
        raise HetpipeError(f"buckets={list(lengths)}: give each length once")
    return sorted(lengths)
