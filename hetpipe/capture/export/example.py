"""The example batch: names its tensors, makes batches of other sizes, and calls the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hetpipe.buckets import Buckets, Size
from hetpipe.capture.export.padding import Padding
from hetpipe.errors import CaptureError, HetpipeError

Array = np.ndarray[Any, Any]
_DTYPES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
    "float32", "float64", "complex64", "complex128",
}  # fmt: skip
"""The dtypes that both numpy and torch have."""


class Example:
    """One batch (x, y) of batch-first tensors; every later batch must have the same structure.

    A leaf is a tensor, named by its position: "x", "x.0", "x.mask", "y". All other values belong to
    the structure. With `buckets`, batches are padded to the length of a bucket, and the example to
    the largest length.
    """

    def __init__(self, x: Any, y: Any, buckets: Buckets | Sequence[int] | None = None) -> None:
        self._x, self._y = x, y
        self._leaves = {
            name: torch.as_tensor(_array_of(name, value))
            for name, value in _named(x, y).items()
            if _is_tensor(value)
        }
        self.names = tuple(self._leaves)
        if not self.names:
            raise CaptureError("the example batch holds no tensor; give the samples as tensors")
        for name, leaf in self._leaves.items():
            if leaf.ndim == 0:
                raise CaptureError(
                    f"{name} of the example batch is 0-d; make the samples the first dimension of "
                    "every tensor"
                )
        self.samples = _samples({name: tuple(t.shape) for name, t in self._leaves.items()})
        self.padding: Padding | None = None
        if buckets is not None:
            arrays = {name: leaf.numpy() for name, leaf in self._leaves.items()}
            self.padding = Padding(Buckets.of(buckets), arrays)
            padded = self.padding.pad(arrays, self.padding.buckets.largest)
            self._leaves = {name: torch.as_tensor(array) for name, array in padded.items()}

    @property
    def assumed_labels(self) -> Collection[str]:
        """The tensors of y that are padded with `IGNORED` without the user's word."""
        return () if self.padding is None else self.padding.assumed

    @property
    def nbytes(self) -> int:
        """The bytes of the example's tensors, padded to the largest length."""
        return sum(leaf.nbytes for leaf in self._leaves.values())

    def size_of(self, leaves: Mapping[str, Array]) -> int:
        """Return the size of a batch; see `Size`."""
        samples = int(next(iter(leaves.values())).shape[0])
        if self.padding is None:
            return samples
        return self.padding.size(samples, self.padding.length_of(leaves))

    def length_of(self, x: Any) -> int:
        """Return the length of a valid batch's `x`; 0 without buckets."""
        if self.padding is None:
            return 0
        return self.padding.length_of({n: v for n, v in _named(x).items() if _is_tensor(v)})

    def sizes(self, samples: Iterable[int]) -> set[int]:
        """Return these numbers of samples in every bucket."""
        if self.padding is None:
            return set(samples)
        lengths = self.padding.buckets.lengths
        return {self.padding.size(int(n), length) for n in samples for length in lengths}

    @property
    def structure(self) -> str:
        """The batch as text, without the tensors' values and numbers of samples."""

        def described(name: str, value: Any) -> Any:
            leaf = self._leaves.get(name)
            return value if leaf is None else (str(leaf.dtype), tuple(leaf.shape[1:]))

        return repr((_map(described, "x", self._x), _map(described, "y", self._y)))

    @cached_property
    def labels_digest(self) -> str:
        """A hash of the values of the batch's integer tensors, and of all tensors in y."""
        digest = hashlib.sha256()
        for name, leaf in self._leaves.items():
            if name[0] == "y" or not leaf.is_floating_point():
                digest.update(name.encode())
                digest.update(leaf.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self, samples: int) -> list[torch.Tensor]:
        """Return the leaves, sliced or repeated to `samples` samples, and cut to their length."""
        if samples < 1:
            raise CaptureError(f"a micro-batch needs at least 1 sample, not {samples}")
        index = torch.arange(int(samples)) % self.samples
        leaves = {name: leaf[index] for name, leaf in self._leaves.items()}
        if isinstance(samples, Size) and self.padding is not None:
            for name, dim in self.padding.dims.items():
                leaves[name] = leaves[name].narrow(dim, 0, samples.length).contiguous()
        return list(leaves.values())

    def rebuild(self, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
        """Return the batch (x, y) with the leaves replaced by `tensors`."""
        values = dict(zip(self.names, tensors, strict=True))

        def replace(name: str, value: Any) -> Any:
            return values.get(name, value)

        return _map(replace, "x", self._x), _map(replace, "y", self._y)

    def leaves(self, x: Any, *y: Any) -> dict[str, Array]:
        """Return the tensors of a batch as row-major arrays, by name; `y` may be left out. With
        buckets the arrays are padded.

        Raises `HetpipeError` if the structure, a dtype or a shape (apart from samples and length)
        differs from the example's, if the leaves disagree on the number of samples or the length,
        or if the batch is longer than every bucket.
        """
        values = _named(x, *y)
        expected = _named(self._x, self._y) if y else _named(self._x)
        if values.keys() != expected.keys():
            raise HetpipeError(
                f"the batch holds {', '.join(values)}, but the example batch held "
                f"{', '.join(expected)}; give both the same structure"
            )
        names = [name for name in self.names if name in expected]
        arrays = {name: self._array(name, values[name]) for name in names}
        for name, value in expected.items():
            if name not in arrays and value != values[name]:
                raise HetpipeError(
                    f"{name} is {values[name]!r}, but {value!r} in the example batch; a value that "
                    "is not a tensor is fixed when the model is captured"
                )
        _samples({name: array.shape for name, array in arrays.items()})
        return arrays if self.padding is None else self.padding.pad(arrays)

    def _array(self, name: str, value: Any) -> Array:
        if not _is_tensor(value):
            raise HetpipeError(
                f"{name} is a {type(value).__name__}, but a tensor in the example batch; convert it"
            )
        array = _array_of(name, value)
        example = self._leaves[name]
        dtype = str(example.dtype).removeprefix("torch.")
        shape = tuple(example.shape)
        dim = None if self.padding is None else self.padding.dims.get(name)
        fixed = [n for n in range(1, len(shape)) if n != dim]
        if array.ndim != len(shape) or any(array.shape[n] != shape[n] for n in fixed):
            varying = "the first dimension" if dim is None else f"dimensions 0 and {dim}"
            unlike = self.padding is None and array.ndim == len(shape)
            cure = ": pad all samples to one length, or give the pipeline buckets" if unlike else ""
            raise HetpipeError(
                f"{name} has shape {array.shape}, but {shape} in the example batch; only {varying} "
                f"may differ{cure}"
            )
        if str(array.dtype) != dtype:
            raise HetpipeError(
                f"{name} is {array.dtype}, but {dtype} in the example batch; convert it"
            )
        return np.ascontiguousarray(array)


def call(model: Callable[..., Any], x: Any) -> Any:
    """Return `model(x)`, `model(*x)` for a tuple or list, `model(**x)` for a dict."""
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, (tuple, list)):
        return model(*x)
    return model(x)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _array_of(name: str, value: torch.Tensor | Array) -> Array:
    """Return an array in native byte order; it may share memory. Raises `CaptureError`."""
    if cure := _cure(value):
        raise CaptureError(f"{name} of the batch is {cure}")
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_conj().resolve_neg().numpy()
    array = np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
    return array if array.flags.writeable else array.copy()


def _cure(value: torch.Tensor | Array) -> str:
    """Describe an unsupported tensor or array and its cure; return "" for a supported one."""
    dtype = str(value.dtype).removeprefix("torch.")
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array; give its numbers with .filled(0), and the mask beside them"
    if isinstance(value, np.ndarray):
        if value.dtype.newbyteorder("=").name not in _DTYPES:
            return f"an array of {dtype}; convert it to numbers that torch has"
    elif value.is_nested:
        return "a nested tensor; pad its rows to one length with .to_padded_tensor(0.0)"
    elif value.layout != torch.strided:
        return f"a tensor in the layout {value.layout}; make it dense with .to_dense()"
    elif value.is_quantized:
        return f"a quantized tensor of {value.dtype}; give its numbers with .dequantize()"
    elif value.device.type == "meta":
        return "a tensor on the meta device, which has no elements; make it on the CPU"
    elif dtype not in _DTYPES:
        return (
            f"a tensor of {dtype}, which numpy lacks; convert batch and model with .float(), and "
            "let passes compute in halves with precision='bfloat16'"
        )
    return ""


def _named(x: Any, *y: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}

    def note(name: str, value: Any) -> Any:
        values[name] = value
        return value

    for letter, value in zip("xy", (x, *y), strict=False):
        _map(note, letter, value)
    return values


def _map(fn: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Replace every value in nested containers by fn(name of the value, value)."""
    if isinstance(value, Mapping):
        return {key: _map(fn, f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map(fn, f"{name}.{i}", item) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return fn(name, value)


def _samples(shapes: Mapping[str, tuple[int, ...]]) -> int:
    sizes = {name: shape[0] for name, shape in shapes.items()}
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise HetpipeError(f"the tensors of a batch differ in their number of samples: {listed}")
    size = next(iter(sizes.values()))
    if size == 0:
        raise HetpipeError("the batch has no samples")
    return size
