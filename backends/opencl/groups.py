"""Which generated kernels share a program: in the next process the same ones.

Runtimes keep what they compiled by the text of a program. A process that compiles the graphs of
single layers before those of stages would make other programs of the same kernels than one that
compiles the stages alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hetpipe.entries import Entries, key_of

from .codegen import Kernel, helpers_identity

MOST = 24
"""The most new kernels in a program: two compilers divide programs between them, not kernels."""
ENTRIES = Entries("opencl/groups", "json", most=5000)

Sources = tuple[str, ...]


def groups_of(kernels: Sequence[Kernel]) -> Iterator[Sources]:
    """The sources of programs that together have these kernels, which are new to this process.

    Kernels that no earlier process had share a program from now on.
    """
    new, grouped = [], set[str]()
    for kernel in kernels:
        if kernel.source in grouped:
            continue
        sources = _load(kernel)
        if sources is None:
            new.append(kernel)
        else:
            grouped.update(sources)
            yield sources
    rest = tuple(kernel.source for kernel in new if kernel.source not in grouped)
    for begin in range(0, len(rest), MOST):
        group = rest[begin : begin + MOST]
        for source in group:
            ENTRIES.store(_key(source), json.dumps(group).encode())
        yield group


def _load(kernel: Kernel) -> Sources | None:
    content = ENTRIES.load(_key(kernel.source))
    return None if content is None else tuple(json.loads(content))


def _key(source: str) -> str:
    """Of a kernel among those that call the same helpers: kernels of another version of this
    package, in a group with one that is as it was, may call functions that are no longer there."""
    return key_of(helpers_identity(), source)
