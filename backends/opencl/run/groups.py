"""Groups generated kernels into programs, and stores the groups for later processes.

Runtimes store compiled programs under their text, so every process should build the same programs.
Without stored groups, a process that compiles single layers before whole stages would put the same
kernels into other programs than a process that compiles only the stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hetpipe.entries import Entries, key_of

from ..lower.launch import Kernel, helpers_identity

MOST = 24
"""The most new kernels in a program: two compilers share the work by programs, not by kernels."""
ENTRIES = Entries("opencl/groups", "json", most=5000)

Sources = tuple[str, ...]


def groups_of(kernels: Sequence[Kernel]) -> Iterator[Sources]:
    """Yield the kernel sources of each program; together they have all of `kernels`.

    The kernels are new to this process. Kernels that no earlier process had form new groups, which
    are stored.
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
    """Return the key of a kernel's group, which depends on the text of all helper functions.

    Without that text, a key could find a group of an older version of this package. Other kernels
    of that group may call functions that no longer exist.
    """
    return key_of(helpers_identity(), source)
