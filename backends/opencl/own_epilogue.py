"""Elementwise operators after a kernel of one's own, done where it writes an element.

Its source ends its parameters with `RESULTS` and writes every element once, by
`STORE(element, value)`. Both are macros that stand before the source in the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .body import Body
from .cnames import C_TYPES, pointed
from .codegen import Kernel, Launch, Store, Tile, indent, with_helpers
from .expr import Coord, Layout, Load, Value, loads, walk
from .nest import Nest
from .signature import Argument, bind

STORES_NOTHING = "#define RESULTS __global float *unused\n#define STORE(element, value)\n#line 1\n"
"""The macros for other kernels of such a source."""


@dataclass(frozen=True, eq=False)
class OwnLaunch:
    """A launch of a source with `STORE`, which is known except for the stores."""

    kernel: Kernel
    arguments: Mapping[str, Argument]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None

    def plain(self, out: Value) -> Launch:
        """The launch that writes the kernel's result alone."""
        store = Store(Tile(out.shape, out.dtype, ()), out, Layout.row_major(out.shape))
        return self.with_stores([store], [store])

    def with_stores(self, group: Sequence[Store], kept: Sequence[Store]) -> Launch:
        """The launch that writes `kept`, stores of a group that begins with the kernel's result."""
        text, results = _macros(group, kept)
        kernel = replace(self.kernel, source=f"{text}#line 1\n{self.kernel.source}")
        args = bind(kernel, {**self.arguments, **results})
        read = [load for store in group[1:] for load in loads(store.expr)]
        inputs = {value.id for value in self.arguments.values() if isinstance(value, Value)}
        inplace = {load.value.id for load in read} - inputs
        inplace -= {load.value.id for load in read if not load.plain}
        return Launch(kernel, self.global_size, self.local_size, args, frozenset(inplace))


def _macros(group: Sequence[Store], kept: Sequence[Store]) -> tuple[str, dict[str, Value]]:
    """The text of the macros, and the tensors that RESULTS declares, by name."""
    result, shape = group[0].expr, group[-1].expr.shape
    whole = Layout.row_major(shape)
    leaves = walk(*(store.expr for store in group))
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, (Load, Coord))]
    nest = Nest(shape, [*layouts, whole])
    body = Body(nest, {store.out.id: store.expr for store in group}, {result: "stored"})
    stores = body.stores([replace(store, layout=whole) for store in kept], 1)
    inner = nest.inner
    lines = [f"const int row = element / {inner}, i = element % {inner};"]
    lines += [*body.row_lines(body.coordinates("row")), *stores]
    pointers = {name: f"__global {pointed(value.dtype)} *" for name, value in body.named.items()}
    declared = [f"{pointer}{name}" for name, pointer in pointers.items()]
    declared += ["const int element", f"const {C_TYPES[result.dtype]} stored"]
    head = f"inline void store_element({', '.join(declared)}) {{"
    results = ", ".join(f"{pointer}result_{name}" for name, pointer in pointers.items())
    passed = "".join(f"result_{name}, " for name in pointers)
    text = with_helpers("\n".join(indent(lines, head, "}")))
    text += f"\n#define RESULTS {results}\n"
    text += f"#define STORE(element, value) store_element({passed}element, value)\n"
    return text, {f"result_{name}": value for name, value in body.named.items()}
