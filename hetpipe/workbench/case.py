"""A case of a specification: the arguments of a launch, and its expected results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.formats.kernelspec import Argument, KernelSpec, Size
from hetpipe.sdk.kernels import Array, KernelCall, LocalMemory
from hetpipe.words import short

MOST_ELEMENTS = 1 << 26
"""Most elements of a tensor."""
POISONS = (0xFF, 0x3D)
"""Bytes that fill outputs before a launch; as a float, 0xFF is NaN and 0x3D a small number."""
SCALES = {"float16": 4.0}
"""Factors of `normal` values in run `VALUES`, by dtype; other dtypes have the factor `SCALE`."""
SCALE = 100.0
_ERF = np.frompyfunc(math.erf, 1, 1)


class Run(IntEnum):
    """The runs of a case. The first two have equal inputs, but different bytes in the outputs."""

    LISTED = 0
    AGAIN = 1
    VALUES = 2
    """Other values: another seed; `normal` values times `scale`, uniform values for some `ones`."""
    SIZES = 3
    """Other sizes: each size is larger by one, except `fixed` and `define` sizes."""


def sizes_of(spec: KernelSpec, number: int, run: int) -> dict[str, int]:
    """Return the named sizes for a run of case `number`."""
    sizes = dict(spec.cases[number])
    if run == Run.SIZES:
        kept = {*spec.fixed, *spec.define}
        sizes = {name: size if name in kept else size + 1 for name, size in sizes.items()}
    return sizes


def call_of(
    spec: KernelSpec, number: int, path: Path, source: str, function: str, seed: int, run: int
) -> KernelCall:
    """Return the launch for a run of case `number`; equal seeds give equal launches.

    Raises `BackendError` for an invalid size.
    """
    sizes = sizes_of(spec, number, run)
    given = [seed, number] if run in (Run.LISTED, Run.AGAIN) else [seed, number, run]
    generator = np.random.default_rng(given)
    arguments: dict[str, Array | int | float | LocalMemory] = {}
    for name, each in spec.argument.items():
        try:
            arguments[name] = _argument(each, sizes, generator, run)
        except BackendError as error:
            raise BackendError(f"case {number}, argument {name}: {error}") from error
    try:
        global_size, local_size = _work_items(spec.global_size, spec.local_size, sizes)
        beside = {
            name: _work_items(other.global_size, other.local_size, sizes)
            for name, other in spec.beside.items()
        }
    except BackendError as error:
        raise BackendError(f"case {number}: {error}") from error
    return KernelCall(
        path, source, function, spec.options_of(sizes), arguments, spec.inputs, spec.outputs,
        global_size, local_size, beside,
    )  # fmt: skip


def _work_items(
    global_size: Sequence[Size], local_size: Sequence[Size], sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the global and the local size as numbers. Raises `BackendError` if they do not fit."""
    items = tuple(size.value(sizes) for size in global_size)
    group = tuple(size.value(sizes) for size in local_size)
    for whole, part in zip(items, group, strict=False):
        if part == 0 or whole % part:
            raise BackendError(
                f"the global size {whole} is no multiple of the local size {part}; "
                f'write "round_up({whole}, {max(part, 1)})"'
            )
    return items, group or None


def _argument(
    spec: Argument, sizes: Mapping[str, int], generator: np.random.Generator, run: int
) -> Array | int | float | LocalMemory:
    if spec.value is not None:
        return spec.value.value(sizes)
    if spec.number is not None:
        return float(spec.number)
    itemsize = np.dtype(spec.dtype).itemsize
    if spec.local is not None:
        return LocalMemory(spec.local.value(sizes) * itemsize)
    assert spec.shape is not None
    shape = tuple(size.value(sizes) for size in spec.shape)
    if math.prod(shape) > MOST_ELEMENTS:
        raise BackendError(f"it has {math.prod(shape)} elements; give at most {MOST_ELEMENTS}")
    if spec.is_input:
        return _values(spec, shape, generator, run == Run.VALUES)
    filled = np.full(math.prod(shape) * itemsize, POISONS[run % 2], np.uint8)
    return filled.view(np.bool_ if spec.dtype == "bool" else spec.dtype).reshape(shape)


def _values(
    spec: Argument, shape: tuple[int, ...], generator: np.random.Generator, other: bool
) -> Array:
    floating = spec.dtype.startswith("float")
    kind = spec.values or ("normal" if floating else "integers")
    scale = SCALES.get(spec.dtype, SCALE) if spec.scale is None else spec.scale
    if kind == "normal":
        values: Array = generator.standard_normal(shape) * (scale if other else 1.0)
    elif kind == "ones" and floating and other and not spec.output and scale != 1.0:
        values = generator.uniform(0.5, 1.5, shape)
    elif kind == "uniform":
        values = generator.uniform(spec.low, spec.high, shape)
    elif kind == "integers":
        low, high = (0, 2) if (spec.low, spec.high) == (-1.0, 1.0) else (spec.low, spec.high)
        values = generator.integers(int(low), max(int(high), int(low) + 1), shape)
    elif kind == "arange":
        values = np.arange(math.prod(shape)).reshape(shape)
    else:
        values = np.zeros(shape) if kind == "zeros" else np.ones(shape)
    return np.ascontiguousarray(values.astype(spec.dtype))


def expected(
    spec: KernelSpec, sizes: Mapping[str, int], call: KernelCall, folder: Path
) -> dict[str, Array]:
    """Return the expected outputs by name, computed from float64 inputs and the sizes.

    `folder` is the folder of the specification. Raises `BackendError` if an expression or the
    reference raises, or returns a wrong shape.
    """
    names: dict[str, Any] = dict(sizes)
    for name, value in call.arguments.items():
        if isinstance(value, np.ndarray):
            if spec.argument[name].is_input:
                names[name] = value.astype(np.float64) if value.dtype.kind == "f" else value.copy()
        elif not isinstance(value, LocalMemory):
            names[name] = value
    results = _by_function(spec, names, folder) if spec.reference else _by_expression(spec, names)
    for name in spec.outputs:
        if name not in results:
            raise BackendError(
                f"{spec.reference} returns no {name!r}; return a dict of all outputs"
            )
        argument = call.arguments[name]
        assert isinstance(argument, np.ndarray), "an output is a tensor"
        shape, result = argument.shape, np.asarray(results[name])
        if result.shape != shape:
            raise BackendError(
                f"the reference of {name} has the shape {list(result.shape)}, but the argument has "
                f"{list(shape)}"
            )
        results[name] = result
    return results


def _by_expression(spec: KernelSpec, names: Mapping[str, Any]) -> dict[str, Any]:
    functions = {name: each for name, each in vars(np).items() if not name.startswith("_")}
    scope: dict[str, Any] = {
        "np": np,
        "erf": lambda x: np.asarray(_ERF(x), np.float64),
        **functions,
        **names,
    }
    results = {}
    for name, text in spec.expect.items():
        try:
            with np.errstate(all="ignore"):
                # Pass the names as globals, so that comprehensions see them. Builtins stay, because
                # numpy's functions need them.
                results[name] = eval(text, scope)
        except Exception as error:
            raise BackendError(
                f"expect.{name} = {short(text)} raises {type(error).__name__}: {error}"
            ) from error
    return results


def _by_function(spec: KernelSpec, names: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    function = load_reference(spec.reference, folder)
    try:
        with np.errstate(all="ignore"):
            result = function(**names)
    except Exception as error:
        raise BackendError(
            f"{spec.reference}({', '.join(names)}) raises {type(error).__name__}: {error}"
        ) from error
    if isinstance(result, Mapping):
        return dict(result)
    if len(spec.outputs) != 1:
        raise BackendError(f"{spec.reference} returns one result; return a dict of all outputs")
    return {spec.outputs[0]: result}


def load_reference(reference: str, folder: Path) -> Any:
    """Load the function `FILE.py:FUNCTION`. Raises `BackendError` if it cannot be loaded."""
    file, _, name = reference.rpartition(":")
    path = folder / file
    if not file or not path.is_file():
        raise BackendError(f"reference {reference!r}: no file {path}; write FILE.py:FUNCTION")
    found = spec_from_file_location(f"hetpipe_reference_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise BackendError(f"{path} raises {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BackendError(f"reference {reference!r}: {path} has no function {name!r}")
    return function
