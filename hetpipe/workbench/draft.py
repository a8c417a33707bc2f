"""Drafts of specifications, written from the outlines of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import BackendError
from hetpipe.sdk.formats.kernelspec import UNFILLED
from hetpipe.sdk.kernels import Outline, OutlineParameter
from hetpipe.words import words

GROUP = 64
"""The local size of a kernel that requires none, but may have work-items beyond its sizes."""
FILL = f'"{UNFILLED}"'
CHANNELS = ("width", "height, width", "depth, height, width")
"""The dimensions of images of rank 1, 2 and 3, before the channels."""


def draft(outline: Outline, source: Path, alone: bool) -> str:
    """Return a specification in which the user still has to fill in what no source tells.

    `alone` says that the source has no other kernel. Raises `BackendError` if hetpipe cannot pass
    a parameter, or if the kernel writes none.
    """
    for each in outline.parameters:
        if each.fault:
            raise BackendError(
                f"{source}: kernel {outline.function} cannot be tested with its parameter "
                f"{each.name}: {each.fault}"
            )
    if not any(_is_output(each) for each in outline.parameters):
        raise BackendError(
            f"{source}: kernel {outline.function} has no parameter that it may write, so it has no "
            "result to test; give it a global pointer that is not const"
        )
    return "\n".join([*_head(outline, source, alone), *_body(outline)]) + "\n"


@dataclass(frozen=True)
class _Extent:
    """The number of elements of each tensor, if one named size determines it."""

    name: str
    """The named size of a case."""
    size: str
    """The number of elements, or of vectors: an expression."""
    global_size: str
    local_size: str
    cases: tuple[int, int, int]


def _extent(outline: Outline) -> _Extent | None:
    """Guess the extent of a kernel in one dimension with at most one whole number."""
    integers, group = _integers(outline), _group(outline)
    if outline.dimensions > 1 or len(integers) > 1 or group is None:
        return None
    taken = {each.name for each in outline.parameters}
    name = integers[0] if integers else next(n for n in ("n", "size", "count") if n not in taken)
    local_size = f"[{group}]"
    if name in outline.bounds:
        return _Extent(name, name, f"round_up({name}, {group})", local_size, (1, 37, 1000))
    if outline.local_size or outline.in_groups:
        size = f"groups * {group}"
        return _Extent("groups", size, size, local_size, (1, 3, 16))
    return _Extent(name, name, name, "", (1, 37, 1000))


def _group(outline: Outline) -> int | None:
    """Return the work-items of a group in one dimension; None if the source does not tell it."""
    first, *others = outline.local_size or (GROUP,)
    return first if all(each == 1 for each in others) else None


def _integers(outline: Outline) -> list[str]:
    return [p.name for p in outline.parameters if not p.space and "int" in p.dtype]


def _head(outline: Outline, source: Path, alone: bool) -> Iterator[str]:
    yield f"# A draft for the kernel {outline.function} of {source.name}, made from its source."
    yield f"# Replace each {UNFILLED}, and check the rest: shapes, sizes and outputs are guesses."
    if not alone:
        yield f'function = "{outline.function}"'
    if unknown := dict.fromkeys(_type_of(p) for p in outline.parameters if not p.dtype):
        options = ", ".join(f'"-D{each}={UNFILLED}"' for each in unknown)
        yield f"options = [{options}]  # the source does not define {words(unknown)}"
    extent, group = _extent(outline), outline.local_size
    if extent is not None:
        yield f'global_size = ["{extent.global_size}"]'
        if extent.local_size:
            why = "  # the source requires it" if group else ""
            yield f"local_size = {extent.local_size}{why}"
        return
    dimensions = max([outline.dimensions, *(at for at, each in enumerate(group, 1) if each != 1)])
    sizes = ", ".join([FILL] * dimensions)
    named = _integers(outline)
    over = f", such as round_up({named[0]}, 8)" if named else ""
    yield f"global_size = [{sizes}]  # the work-items of each get_global_id{over}"
    if group:
        numbers = ", ".join(FILL if each is None else str(each) for each in group[:dimensions])
        yield f"local_size = [{numbers}]  # the source requires it"


def _type_of(parameter: OutlineParameter) -> str:
    return parameter.text.replace("*", " ").split()[-2]


def _is_output(parameter: OutlineParameter) -> bool:
    return parameter.space in ("global", "image") and bool(parameter.uses & {"written", "passed"})


def _body(outline: Outline) -> Iterator[str]:
    extent = _extent(outline)
    for each in outline.parameters:
        yield ""
        yield f"[argument.{each.name}]  # {each.text}"
        yield from _argument(each, extent, _group(outline))
    outputs = [each.name for each in outline.parameters if _is_output(each)]
    names = [p.name for p in outline.parameters if p.space != "local" and _is_read(p)]
    if extent is not None and extent.name not in names:
        names.append(extent.name)
    yield ""
    yield '[expect]  # numpy expressions; or, instead of this table, reference = "FILE.py:FUNCTION"'
    for name in outputs:
        yield f"{name} = {FILL}  # an expression of {words(names)}, such as 2.0 * {names[0]}"
    sizes = [extent.name] if extent is not None else _integers(outline) or ["n"]
    for column in range(3):
        yield ""
        yield "[[case]]"
        for place, size in enumerate(sizes):
            cases = extent.cases if extent is not None else (1, 5 + 2 * place, 64 + 16 * place)
            yield f"{size} = {cases[column]}"


def _is_read(parameter: OutlineParameter) -> bool:
    """Return whether the kernel gets values through the parameter."""
    return not _is_output(parameter) or bool(parameter.uses & {"read", "passed"})


def _argument(each: OutlineParameter, extent: _Extent | None, group: int | None) -> Iterator[str]:
    """Yield the lines of an argument's table."""
    if not each.space:
        if "int" in each.dtype:
            yield f'value = "{each.name if extent is None else extent.size}"'
        elif each.dtype:
            yield "number = 0.5  # the same number in every case"
        else:
            yield f"number = {FILL}  # a number; for a whole number: value, a size"
        return
    if each.space == "local":
        whole = group if each.width == 1 or group is None else group * each.width
        known = "its elements: here one for each work-item of a group"
        yield f"local = {FILL if group is None else whole}  # {known}"
        yield from _dtype(each)
        return
    yield _shape(each, extent)
    yield from _dtype(each)
    if _is_output(each):
        yield "output = true"
        if "passed" in each.uses:
            yield f"{_values(each)}  # remove this, unless the kernel reads {each.name}"
        elif "read" in each.uses:
            yield f"{_values(each)}  # the kernel reads it; remove, if only after it has written"
    elif not each.uses:
        yield "# the kernel does not use it"


def _shape(each: OutlineParameter, extent: _Extent | None) -> str:
    if each.rank:
        size = FILL if extent is None else f'"{extent.size}"'
        sizes = ", ".join([size if each.rank == 1 else FILL] * each.rank)
        return f"shape = [{sizes}, 4]  # {CHANNELS[each.rank - 1]}, channels"
    if extent is None:
        return f'shape = [{FILL}]  # its number of elements, such as "rows * columns"'
    if each.width == 1:
        return f'shape = ["{extent.size}"]'
    whole = f"({extent.size})" if " " in extent.size else extent.size
    return f'shape = ["{whole} * {each.width}"]  # in elements: {each.width} for each vector'


def _values(each: OutlineParameter) -> str:
    return 'values = "integers"' if "int" in each.dtype else 'values = "normal"'


def _dtype(each: OutlineParameter) -> Iterator[str]:
    if not each.dtype:
        yield f"dtype = {FILL}  # {_type_of(each)} as a dtype, such as float32"
    elif each.dtype != "float32":
        yield f'dtype = "{each.dtype}"'
