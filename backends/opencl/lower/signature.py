"""Arguments of kernels by name, checked against the parameters that the source declares.

Parameters are parsed from the source: `clGetKernelArgInfo` is optional and needs a built kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from hetpipe.errors import BackendError

from .expr import Value
from .launch import Kernel

Argument = Value | int | float
QUALIFIERS = re.compile(
    r"\b(__global|global|__local|local|__constant|constant|const|restrict|volatile)\b"
)
VECTOR = re.compile(r"([a-z]+)(2|4|8|16)")
"""A vector type without a gap in memory: a vector of three elements takes the room of four."""
DEFINE = re.compile(r"#define (\w+)(?:\(([^)]*)\))?[ \t]*(.*)")
TYPEDEF = re.compile(r"\btypedef\s+(\w+(?:[ \t]+\w+)?)\s+(\w+)\s*;")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: a number of type `ctype`, or a pointer to elements of that type."""

    name: str
    ctype: str
    points: bool
    constant: bool = False
    """Whether it is a pointer to constant elements."""
    space: str = ""
    """The address space of the elements: global, local or constant; empty for a number."""

    def __str__(self) -> str:
        return f"{self.ctype} {'*' if self.points else ''}{self.name}"

    def element_of(self, count: int) -> str:
        """Return the scalar type if `count` elements are whole vectors of `ctype`, else `ctype`."""
        found = VECTOR.fullmatch(self.ctype)
        return found[1] if found and count % int(found[2]) == 0 else self.ctype

    def takes(self, argument: Argument) -> bool:
        """Return whether an argument fits; a tensor that fills whole vectors fits a vector type."""
        if isinstance(argument, Value):
            count = math.prod(argument.shape)
            return self.points and pointed(argument.dtype) == self.element_of(count)
        number = "float" if isinstance(argument, float) else "int"
        return not self.points and self.ctype == number


def bind(kernel: Kernel, arguments: Mapping[str, Argument]) -> tuple[Argument, ...]:
    """Return the arguments in declared order. Raises `BackendError` if they are not as declared."""
    declared = {parameter.name: parameter for parameter in parameters(kernel)}
    for name in [*declared, *arguments]:
        parameter, argument = declared.get(name), arguments.get(name)
        if parameter is None or argument is None or not parameter.takes(argument):
            raise BackendError(
                f"kernel {kernel.name}, argument {name!r}: the source declares "
                f"{parameter or 'none of that name'}, the launch gives {_described(argument)}"
            )
    return tuple(map(arguments.__getitem__, declared))


def _described(argument: Argument | None) -> str:
    if argument is None:
        return "none of that name"
    if isinstance(argument, Value):
        return f"a tensor of {argument.dtype}"
    return f"the {type(argument).__name__} {argument}"


@cache
def parameters(kernel: Kernel) -> tuple[Parameter, ...]:
    """Return the parameters in order. Raises `BackendError` if the source has no such kernel."""
    source = uncommented(kernel.source).replace("\\\n", " ")
    macros: dict[str, tuple[list[str] | None, str]] = {
        name: (None, ctype) for ctype, name in TYPEDEF.findall(source)
    }
    for option in kernel.options:
        name, _, body = option.removeprefix("-D").partition("=")
        macros[name] = (None, body or "1")
    text = "\n".join(_lines(source, macros))
    head = re.search(rf"\b(?:__)?kernel\b[^;{{}}]*?\bvoid\s+{kernel.name}\s*\(", text)
    if head is None:
        raise BackendError(f"the source of kernel {kernel.name} does not declare it")
    found = _expand(inside(text, head.end()), macros).strip()
    return () if found in ("", "void") else tuple(map(_parameter, split(found)))


def _lines(source: str, macros: dict[str, tuple[list[str] | None, str]]) -> Iterator[str]:
    """Yield the lines that the preprocessor keeps, and fill `macros`; each `#if` counts as true."""
    kept = [True]
    for line in source.split("\n"):
        word, _, rest = line.strip().partition(" ")
        if word in ("#if", "#ifdef", "#ifndef"):
            kept.append(word == "#if" or (rest.strip() in macros) == (word == "#ifdef"))
        elif word == "#else":
            kept[-1] = not kept[-1]
        elif word == "#endif":
            kept = kept[:-1] or [True]
        elif all(kept):
            if (define := DEFINE.match(line.strip())) is not None:
                name, names, body = define.groups()
                formal = None if names is None else split(names)
                macros[name] = (formal, body.strip())
            else:
                yield line


def inside(text: str, begin: int, pair: str = "()") -> str:
    """Return the text from `begin`, just after an opening parenthesis, to the closing one."""
    depth, steps = 1, {pair[0]: 1, pair[1]: -1}
    for end in range(begin, len(text)):
        depth += steps.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return text[begin:]


def _expand(text: str, macros: Mapping[str, tuple[list[str] | None, str]]) -> str:
    for name, (formal, body) in macros.items():
        if formal is None:
            text = replaced(text, {name: body})
            continue
        while (call := re.search(rf"\b{name}\s*\(", text)) is not None:
            argument_list = inside(text, call.end())
            actual = dict(zip(formal, split(argument_list), strict=False))
            filled = replaced(body, actual).replace("##", "")
            text = text[: call.start()] + filled + text[call.end() + len(argument_list) + 1 :]
    return text


def replaced(text: str, names: Mapping[str, str]) -> str:
    """Return the text with whole words replaced as in `names`."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def split(text: str) -> list[str]:
    """Return the parts between commas, without outer spaces."""
    return list(map(str.strip, text.split(",")))


def _parameter(text: str) -> Parameter:
    *ctype, name = QUALIFIERS.sub(" ", text).replace("*", " ").split() or ["?"]
    before, star, _ = text.partition("*")
    space = next((each for each in ("local", "constant", "global") if each in before), "")
    return Parameter(
        name, " ".join(ctype) or "?", bool(star), bool(star) and "const" in before.split(), space
    )


def uncommented(source: str) -> str:
    """Return the source with comments replaced by blanks; line numbers stay the same."""
    return COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


C_TYPES = {
    "float64": "double", "float32": "float", "int64": "long", "int32": "int", "int16": "short",
    "int8": "char", "uint8": "uchar", "bool": "uchar", "float16": "float",
}  # fmt: skip
"""The C type in which kernels compute a dtype; a bool is a byte, 0 or 1. float16 exists in memory
only: kernels convert it with `vload_half` and `vstore_half`, which every OpenCL has."""

MASKS = {"double": "long", "float": "int", "uchar": "char"}
"""The signed integer type of the same width, for each type that is not a signed integer."""


def literal(number: float | int | bool, dtype: str) -> str:
    """Return `number` as a C literal of `dtype`; integers are rounded towards zero, as in torch."""
    if dtype not in ("float16", "float32", "float64"):
        whole = int(bool(number)) if dtype == "bool" else int(number)
        if whole == -(2**63):
            return "(-9223372036854775807L - 1)"
        return f"{whole}L" if dtype == "int64" else str(whole)
    with np.errstate(over="ignore"):
        value = float(number) if dtype == "float64" else float(np.float32(number))
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(value) + ("" if dtype == "float64" else "f")


def pointed(dtype: str) -> str:
    """Return the C type of an element of `dtype` in memory."""
    return "half" if dtype == "float16" else C_TYPES[dtype]


def vector(ctype: str, width: int) -> str:
    """Return the C type of `width` elements: `float16` for 16 floats, `float` for one."""
    return ctype if width == 1 else f"{ctype}{width}"
