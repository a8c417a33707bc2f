"""Elementwise operators that a user kernel applies to its result before writing an element.

The kernel's source ends its parameters with `RESULTS` and writes every element once, by
`STORE(element, value)`. The program defines both macros before the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .body import Body, Nest
from .codegen import indent
from .expr import Coord, Layout, Load, Value, loads, walk
from .launch import Kernel, Launch, Store, Tile, with_helpers
from .signature import C_TYPES, Argument, bind, pointed

STORES_NOTHING = "#define RESULTS __global float *unused\n#define STORE(element, value)\n#line 1\n"
"""Macros for the packing kernels of such a source."""


@dataclass(frozen=True, eq=False)
class OwnLaunch:
    """A launch of a source with `STORE`, complete except for its stores."""

    kernel: Kernel
    arguments: Mapping[str, Argument]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None

    def plain(self, out: Value) -> list[Launch]:
        """Return the launches that write only the kernel's result."""
        store = result_alone(out)
        return self.with_stores([store], [store])

    def with_stores(self, group: Sequence[Store], kept: Sequence[Store]) -> list[Launch]:
        """Return the launches that write `kept`; the kernel's result is the first of `group`."""
        text, results = macros(group, kept)
        kernel = replace(self.kernel, source=f"{text}#line 1\n{self.kernel.source}")
        args = bind(kernel, {**self.arguments, **results})
        inplace, apart = overwritable(group, self.arguments)
        return [Launch(kernel, self.global_size, self.local_size, args, inplace, apart)]


def result_alone(out: Value) -> Store:
    """Return the store of a kernel's result, without an epilogue."""
    return Store(Tile(out.shape, out.dtype, ()), out, Layout.row_major(out.shape))


def overwritable(
    group: Sequence[Store], arguments: Mapping[str, Argument]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of tensors that results may overwrite, and the ids of the kernel's tensors.

    Only the epilogue reads tensors of the first set: each element just before it is overwritten.
    """
    read = [load for store in group[1:] for load in loads(store.expr)]
    own = frozenset(value.id for value in arguments.values() if isinstance(value, Value))
    crooked = {load.value.id for load in read if not load.plain}
    return frozenset({load.value.id for load in read} - own - crooked), own


def macros(
    group: Sequence[Store], kept: Sequence[Store], given: Value | None = None
) -> tuple[str, dict[str, Argument]]:
    """Return the text of RESULTS and STORE, and the tensors that RESULTS declares, by name.

    With `given`, the result of one of the stores, STORE returns the element's value in `given`.
    """
    result, shape = group[0].expr, group[-1].expr.shape
    whole = Layout.row_major(shape)
    leaves = walk(*(store.expr for store in group))
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, (Load, Coord))]
    nest = Nest(shape, [*layouts, whole])
    body = Body(nest, {store.out.id: store.expr for store in group}, {result: "stored"})
    returned = None
    if given is not None:
        returned = next(store.expr for store in group if store.out.id == given.id)
    stores = body.stores([replace(store, layout=whole) for store in kept], 1, returned)
    inner = nest.inner
    lines = [f"const int row = element / {inner}, i = element % {inner};"]
    if nest.rows == 1:  # without the length, results of all sizes share one text
        lines = ["const int row = 0, i = element;"]
    lines += [*body.row_lines("row"), *stores]
    pointers = {name: f"__global {pointed(value.dtype)} *" for name, value in body.named.items()}
    declared = [f"{pointer}{name}" for name, pointer in pointers.items()]
    declared += ["const int element", f"const {C_TYPES[result.dtype]} stored"]
    head = f"inline {'void' if given is None else 'float'} store_element({', '.join(declared)}) {{"
    results = ", ".join(f"{pointer}result_{name}" for name, pointer in pointers.items())
    passed = "".join(f"result_{name}, " for name in pointers)
    text = with_helpers("\n".join(indent(lines, head, "}")))
    text += f"\n#define RESULTS {results or 'const int result_none'}\n"
    text += f"#define STORE(element, value) store_element({passed}element, value)\n"
    if not body.named:
        return text, {"result_none": 0}
    return text, {f"result_{name}": value for name, value in body.named.items()}
