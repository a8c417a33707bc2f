"""Joins many kernels into one source, because a board holds one binary at a time.

A part of the source is a kernel file with one set of `-D` options, or all generated kernels. Two
parts may define the same names, so macros around each part rename functions, types and variables
that an earlier part has:

    #define ROWS 8                      -DROWS=8
    #define load_upto load_upto_2       an earlier part has a function load_upto
    ...                                 the text of the file
    #undef load_upto
    #undef ROWS                         ... and each macro that the text defines
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..lower.launch import Kernel, with_helpers
from ..lower.signature import inside, replaced, split

MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?:\(([^)]*)\))?(.*)$", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
GUARD_END = "\n#endif\n"
TYPE = re.compile(r"^typedef [^{};\n]*\b(\w+);[ \t]*$", re.MULTILINE)
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Joined:
    """A source with several kernels, its compiler options, and the kernels' names in the text."""

    text: str
    options: tuple[str, ...]
    names: dict[Kernel, str]


def joined(kernels: Iterable[Kernel]) -> list[Joined]:
    """Join kernels with the same compiler options into one source; `-D` options may differ."""
    parts: dict[tuple[str, ...], dict[tuple[str, ...], list[Kernel]]] = {}
    for kernel in dict.fromkeys(kernels):
        others = tuple(option for option in kernel.options if not option.startswith("-D"))
        key = () if kernel.generated else (kernel.source, *kernel.options)
        parts.setdefault(others, {}).setdefault(key, []).append(kernel)
    return [_join(list(own.values()), options) for options, own in parts.items()]


def _join(parts: Sequence[Sequence[Kernel]], options: tuple[str, ...]) -> Joined:
    taken: set[str] = set()
    types: dict[object, str] = {}
    texts: list[str] = []
    names: dict[Kernel, str] = {}
    for number, kernels in enumerate(parts, 1):
        text = with_helpers("\n".join(_once(kernel.source for kernel in kernels)))
        macros = [_macro(o) for o in kernels[0].options if o.startswith("-D")]
        text, known = _without_types(text, macros, types)
        own = defined(text)
        renamed = {name: _fresh(name, number, taken) for name in sorted(own & taken)}
        taken |= own | set(renamed.values())
        for key, name in _types(text, macros).items():
            types[key] = renamed.get(name, name)
        renamed |= {name: other for name, other in known.items() if name != other}
        names |= {kernel: renamed.get(kernel.name, kernel.name) for kernel in kernels}
        of_text = [match[1] for match in MACRO.finditer(text)]
        ends = dict.fromkeys([*renamed, *(name for name, _ in macros), *of_text])
        texts += [
            f"// ---- part {number} of {len(parts)}: {', '.join(k.name for k in kernels)}",
            *(f"#define {name} {value}" for name, value in macros),
            *(f"#define {name} {other}" for name, other in renamed.items()),
            text.rstrip("\n"),
            *(f"#undef {name}" for name in ends),
            "",
        ]
    return Joined("\n".join(texts), options, names)


def _once(sources: Iterable[str]) -> Iterator[str]:
    """Yield the sources, without guarded definitions (`#ifndef`) that an earlier source has."""
    heads: set[str] = set()
    for source in dict.fromkeys(sources):
        head, guard, rest = source.rpartition(GUARD_END)
        yield rest if guard and head in heads else source
        heads.add(head)


def _types(text: str, macros: Sequence[tuple[str, str]]) -> dict[object, str]:
    """Return the name of each one-line typedef, by its line and the macros that the line uses."""
    found: dict[object, str] = {}
    for line in TYPE.finditer(text):
        words = set(WORD.findall(line[0]))
        found[line[0], tuple(macro for macro in macros if macro[0] in words)] = line[1]
    return found


def _without_types(
    text: str, macros: Sequence[tuple[str, str]], types: Mapping[object, str]
) -> tuple[str, dict[str, str]]:
    """Return the text without the typedefs of earlier parts, and {name here: earlier name}.

    Intel's channels treat two names of one type as two types, which makes calls ambiguous.
    """
    known = {}
    for key, name in _types(text, macros).items():
        if key in types:
            known[name] = types[key]
    dropped = TYPE.sub(lambda line: "" if line[1] in known else line[0], text)
    return dropped, known


def _macro(option: str) -> tuple[str, str]:
    """Split a macro option: `-DROWS=8` -> ROWS, 8."""
    name, equals, value = option.removeprefix("-D").partition("=")
    return name, value if equals else "1"


def _fresh(name: str, number: int, taken: set[str]) -> str:
    while (other := f"{name}_{number}") in taken:
        number += 1
    return other


def defined(source: str) -> set[str]:
    """Return the names of functions, types and variables that a text declares outside functions.

    Declarations by macros and in all branches of an `#if` count.
    """
    text = COMMENT.sub(" ", source).replace("\\\n", " ")
    macros = {m[1]: (split(m[2]), m[3]) for m in MACRO.finditer(text) if m[2] is not None}
    bodies = {m[1]: m[3] for m in MACRO.finditer(text) if m[2] is None and "{" in m[3]}
    plain = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    return set(_declared(replaced(_without(plain, "{", "}"), bodies), macros))


def _declared(text: str, macros: dict[str, tuple[list[str], str]]) -> Iterator[str]:
    outside = _without(text, "{", "}")
    for name, (formal, body) in macros.items():
        for call in re.finditer(rf"\b{name}\s*\(", outside):
            before = outside[: call.start()]
            actual = split(inside(outside, call.end()))
            if before.count("(") == before.count(")") and len(actual) == len(formal):
                filled = replaced(body, dict(zip(formal, actual, strict=True)))
                others = {other: macros[other] for other in macros if other != name}
                yield from _declared(filled.replace("##", ""), others)
    flat = _without(outside, "(", ")")
    yield from re.findall(r"__kernel\s+void\s+(\w+)", flat)  # also if the body is a macro
    yield from re.findall(r"(\w+)\s*\(\)\s*\{\}", flat)
    for declaration in re.split(r"\(\)\s*\{\}|;", flat):
        head = re.sub(r"__attribute__\s*\(\)", "", declaration.partition("=")[0])
        names = re.findall(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", head)
        if len(WORD.findall(head)) > 1 or "}" in head:
            yield from names


def _without(text: str, opening: str, closing: str) -> str:
    """Return the text without the content of these brackets."""
    kept: list[str] = []
    depth = 0
    for char in text:
        depth -= char == closing
        if depth <= 0:
            kept.append(char)
        depth += char == opening
    return "".join(kept)
