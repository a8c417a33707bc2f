"""The outline of a kernel, judged by the text of its source: parameters, their use, work-items."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.kernels import Outline, OutlineParameter

from ..lower.launch import Kernel
from ..lower.signature import VECTOR, Parameter, inside, parameters, replaced, uncommented
from .elements import CTYPES, ELEMENTS
from .images import DIMENSIONS, is_image

GROUP_SIZE = re.compile(r"\breqd_work_group_size\s*\(([^)]*)\)")
COORDINATE = re.compile(r"\bget_(?:global_id|group_id|global_size)\s*\(\s*([012])\s*\)")
IN_GROUPS = re.compile(r"\b(?:get_local_id|get_local_size|barrier|work_group_\w+|__local|local)\b")
ASSIGNED = re.compile(r"(?:\s*\.\s*\w+)?\s*(=(?!=)|(?:[-+*/%&|^]|<<|>>)=|\+\+|--)")
WRITERS = re.compile(r"vstore\w*|write_image\w*")
DEREFERENCED = re.compile(r"(?:(?<=[^\w)\]\s])|^)\s*\*\s*(\(?)$")
READERS = re.compile(r"vload\w*|read_image\w*|prefetch|get_image_\w+")
COPIES = re.compile(r"async_work_group_(?:strided_)?copy")
IMAGE_DTYPES = {"f": "float32", "i": "int32", "ui": "uint8", "h": "float16"}
"""The dtype of an image by the end of the function that reads or writes it."""


def outline_of(source: str, function: str, options: Sequence[str]) -> Outline:
    """Return the outline of a kernel. Raises `BackendError` if the source does not declare it."""
    declared = parameters(Kernel(source, function, tuple(options)))
    head, body = _parts(source, function)
    sizes = GROUP_SIZE.search(head)
    integers = [each.name for each in declared if _is_integer(each)]
    return Outline(
        function,
        tuple(_used(each, body) for each in declared),
        dimensions=1 + max(map(int, COORDINATE.findall(body)), default=0),
        local_size=_numbers(sizes[1], source) if sizes else (),
        bounds=tuple(name for name in integers if _limits(name, body)),
        in_groups=IN_GROUPS.search(body) is not None or any(p.space == "local" for p in declared),
    )


def _parts(source: str, function: str) -> tuple[str, str]:
    """Return the text from `kernel` to the function's name, and the text of its body."""
    text = uncommented(source)
    head = re.search(rf"\b(?:__)?kernel\b[^;{{}}]*?\bvoid\s+{function}\s*\(", text)
    if head is None:
        raise BackendError(f"the source of kernel {function} does not declare it")
    end = head.end() + len(inside(text, head.end()))
    begin = text.find("{", end)
    return head[0] + text[end:begin], inside(text, begin + 1, "{}")


def _numbers(text: str, source: str) -> tuple[int | None, ...]:
    """Return the numbers of an attribute; None for a macro whose number is unknown."""
    macros = dict(re.findall(r"^\s*#\s*define\s+(\w+)\s+(\d+)\s*$", uncommented(source), re.M))
    words = [replaced(each, macros).strip() for each in text.split(",")]
    return tuple(int(each) if each.isdecimal() else None for each in words)


def _limits(name: str, body: str) -> bool:
    """Return whether a condition compares something with the number `name`."""
    near = re.compile(rf"(?:[<>]=?\s*\(?\s*{name}\b)|(?:\b{name}\s*\)?\s*[<>]=?)")
    for found in re.finditer(r"\bif\s*\(", body):
        if near.search(inside(body, found.end())):
            return True
    return re.search(rf"[<>]=?\s*{name}\s*\)?\s*\?", body) is not None


def _is_integer(parameter: Parameter) -> bool:
    kind = CTYPES.get(parameter.ctype)
    return not parameter.points and kind is not None and np.dtype(kind).kind in "iu"


def _used(parameter: Parameter, body: str) -> OutlineParameter:
    """Return a parameter with its element and its use in the kernel's body."""
    uses = set(_uses(parameter.name, body))
    if parameter.constant or parameter.space == "constant":
        uses -= {"written", "passed"}
    elif not uses and parameter.points:
        uses.add("passed")  # a macro may use it
    space, rank, width = parameter.space, 0, 1
    scalar = parameter.ctype
    if is_image(parameter):
        space, rank = "image", DIMENSIONS[parameter.ctype.split()[-1]]
        call = re.search(rf"\b(?:read|write)_image(\w+)\s*\(\s*{parameter.name}\b", body)
        dtype = IMAGE_DTYPES.get(call[1] if call else "", "float32")
    else:
        if (vector := VECTOR.fullmatch(scalar)) and parameter.points:
            scalar, width = vector[1], int(vector[2])
        dtype = (ELEMENTS if parameter.points else _NUMBERS).get(scalar, "")
    qualifiers = [space if space != "image" else "", "const" if parameter.constant else ""]
    return OutlineParameter(
        parameter.name,
        " ".join(filter(None, (*qualifiers, str(parameter)))),
        space,
        dtype,
        "" if dtype else _fault(parameter),
        width,
        rank,
        frozenset(uses),
    )


_NUMBERS = {name: np.dtype(kind).name for name, kind in CTYPES.items()}


def _fault(parameter: Parameter) -> str:
    """Return why hetpipe cannot pass a parameter; empty if its type may be a macro."""
    ctype = parameter.ctype
    if re.fullmatch(r"[a-z]+3", ctype) and parameter.points:
        return f"a {ctype} takes the room of four elements: declare its scalars, and use vload3"
    if not parameter.points and (re.fullmatch(r"[a-z]+\d+", ctype) or ctype == "half"):
        return f"it is a {ctype} by value: pass a pointer, or a number"
    if ctype.endswith("_t") or ctype.split()[0] in ("struct", "pipe"):
        return f"it is a {ctype}: pass numbers or pointers to numbers, or declare it in the source"
    return ""


def _uses(name: str, body: str) -> Iterator[str]:
    """Yield `read`, `written` and `passed` for each place where the body uses a parameter.

    `passed` means that the address goes to another variable or function.
    """
    for found in re.finditer(rf"\b{name}\b", body):
        before, after = body[: found.start()].rstrip(), body[found.end() :].lstrip()
        behind = _behind(after)
        has_address = before.endswith("&")
        if after.startswith("[") and not has_address:
            yield from _access(before, behind)
        elif (star := DEREFERENCED.search(before)) is not None:
            yield from _access(
                before[: star.start()], after.partition(")")[2] if star[1] else after
            )
        else:
            yield from _given(*_call(before.removesuffix("&")))


def _given(function: str, number: int) -> Sequence[str]:
    """Return the uses of an address that is an argument of a call."""
    if WRITERS.fullmatch(function):
        return ["written"]
    if READERS.fullmatch(function):
        return ["read"]
    if COPIES.fullmatch(function):
        return ["read" if number else "written"]
    if function.startswith(("atomic_", "atom_")) and number == 0:
        return ["read", "written"]
    return ["passed"]


def _access(before: str, after: str) -> Sequence[str]:
    """Return the uses of an element; `before` and `after` surround it."""
    if before.endswith(("++", "--")):
        return ["read", "written"]
    assigned = ASSIGNED.match(after)
    if assigned is None:
        return ["read"]
    return ["written"] if assigned[1] == "=" else ["read", "written"]


def _behind(text: str) -> str:
    """Return the text behind all subscripts at its beginning."""
    while text.startswith("["):
        text = text[len(inside(text, 1, "[]")) + 2 :].lstrip()
    return text


def _call(before: str) -> tuple[str, int]:
    """Return the function in whose arguments `before` ends, and the number of the argument.

    Both are empty if `before` ends in no call.
    """
    depth, number = 0, 0
    for at in range(len(before) - 1, -1, -1):
        letter = before[at]
        if letter in ")]}":
            depth += 1
        elif letter in "([{" and depth:
            depth -= 1
        elif letter == "(":
            if name := re.search(r"(\w+)\s*$", before[:at]):
                return name[1], number
        elif letter in "[{;":
            break
        elif letter == "," and not depth:
            number += 1
    return "", 0
