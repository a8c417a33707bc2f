"""Reads the serialised form of a graph (`hetpipe.sdk.formats.serialised`) from untrusted bytes."""

from __future__ import annotations

import math
import zlib
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from hetpipe.errors import BackendError
from hetpipe.sdk.formats import serialised as form
from hetpipe.sdk.graph import graph_of_rows, resolve_operator

if TYPE_CHECKING:
    from torch import fx

_MOST_ELEMENTS = 1 << 59  # the number of bytes then fits in 63 bits


def deserialise(data: bytes) -> fx.GraphModule:
    """Restore a graph from `serialise`; tensors are on the meta device.

    Raises `BackendError` for bytes of another version, for damaged bytes, and for an operator or
    overload that this torch lacks.
    """
    rows = _Reader(data).rows()
    graph = graph_of_rows(rows)
    for node, row in zip(graph.graph.nodes, rows, strict=True):
        if node.name != row[1]:
            raise _damaged(
                f"a node has the name {row[1][:40]!r}, which another node has "
                "or Python does not allow"
            )
    return graph


class _Reader:
    """Reads rows of `graph_rows` from bytes, and checks every number before it uses it."""

    def __init__(self, data: bytes) -> None:
        self._data = data = bytes(data)
        if len(data) < form.HEADER.size or data[: len(form.MAGIC)] != form.MAGIC:
            raise BackendError(f"these {len(data)} bytes are no serialised graph")
        _, version, nbytes, checksum, strings, strings_nbytes, nodes = form.HEADER.unpack_from(data)
        if version != form.VERSION:
            raise BackendError(
                f"the graph has version {version} of the serialised form, this hetpipe reads "
                f"{form.VERSION}: install a matching version"
            )
        if nbytes != len(data):
            raise _damaged(f"it has {len(data)} bytes, but its header counts {nbytes}")
        if checksum != zlib.crc32(data[form.CHECKED_FROM :]):
            raise _damaged("its checksum does not match its content")
        self._at = form.HEADER.size
        table = self._take(strings_nbytes)
        if strings_nbytes and table[-1]:
            raise _damaged("the last string has no end")
        try:
            self._strings = [text.decode() for text in table.split(b"\0")[:-1]]
        except UnicodeDecodeError as error:
            raise _damaged("a string is not in UTF-8") from error
        if len(self._strings) != strings:
            raise _damaged(f"it has {len(self._strings)} strings, but its header counts {strings}")
        self._nodes = nodes
        self._vals: list[Any] = []
        self._names: set[str] = set()

    def rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for number in range(self._nodes):
            row = self._node()
            if (row[0] == "output") != (number == self._nodes - 1):
                raise _damaged("its output is not the last node")
            rows.append(row)
            self._vals.append(row[5])
        if not rows:
            raise _damaged("it has no nodes")
        if self._at != len(self._data):
            raise _damaged(f"its last node ends at byte {self._at} of {len(self._data)}")
        return rows

    def _node(self) -> tuple[Any, ...]:
        kind, name, layer = self._u8(), self._text(), self._u32()
        where = None if layer == form.NONE else self._string(layer)
        if not name.isidentifier() or name == "self" or iskeyword(name) or name in self._names:
            raise _damaged(
                f"a node has the name {name[:40]!r}, which another node has or"
                " Python does not allow"
            )
        self._names.add(name)
        if kind == form.INPUT:
            steady, checked = self._input()
            return "placeholder", name, name, ("list", []), {}, self._form(), where, steady, checked
        if kind == form.CALL:
            target, args, kwargs, val = self._call()
            return "call_function", name, target, args, kwargs, val, where, False, None
        if kind == form.ITEM:
            args, val = self._item(), self._form()
            return "call_function", name, "getitem", args, {}, val, where, False, None
        if kind != form.OUTPUT:
            raise _damaged(f"a node is of kind {kind}")
        outputs = ("list", [self._reference() for _ in range(self._count(4))])
        return "output", name, "output", ("list", [outputs]), {}, None, where, False, None

    def _input(self) -> tuple[bool, tuple[int, int, int | None] | None]:
        flags = self._u8()
        known = form.STEADY | form.CHECKED | form.IGNORED
        if flags > known or (flags & form.IGNORED and not flags & form.CHECKED):
            raise _damaged(f"an input has the flags {flags}")
        checked = None
        if flags & form.CHECKED:
            low, size = self._i64(), self._i64()
            checked = (low, size, self._i64() if flags & form.IGNORED else None)
        return bool(flags & form.STEADY), checked

    def _call(self) -> tuple[str, Any, dict[str, Any], Any]:
        target = self._text()
        if target == "getitem":
            raise _damaged("a call has the operator getitem, which only an item may have")
        names = [argument.name for argument in resolve_operator(target)._schema.arguments]
        args = [self._argument(0) for _ in range(self._count(1))]
        kwargs = {}
        for _ in range(self._count(5)):
            key = self._text()
            if key not in names[len(args) :] or key in kwargs:
                raise _damaged(f"{target} has no argument {key[:40]!r}, or has it already")
            kwargs[key] = self._argument(0)
        if len(args) > len(names):
            raise _damaged(f"{target} has {len(args)} arguments; it takes {len(names)}")
        several = self._bool()
        val = [self._form() for _ in range(self._count(2))] if several else self._form()
        return target, ("list", args), kwargs, val

    def _item(self) -> tuple[str, list[tuple[str, Any]]]:
        number, index = self._u32(), self._u32()
        val = self._vals[number] if number < len(self._vals) else None
        if not isinstance(val, list) or index >= len(val):
            raise _damaged(f"an item is result {index} of node {number}, which has no such result")
        return "list", [("node", number), ("value", index)]

    def _argument(self, depth: int) -> tuple[str, Any]:
        kind = self._u8()
        if kind == form.A_NODE:
            return self._reference()
        if kind == form.A_LIST:
            if depth == form.MOST_DEPTH:
                raise _damaged(f"it has lists deeper than {form.MOST_DEPTH}")
            return "list", [self._argument(depth + 1) for _ in range(self._count(1))]
        if kind == form.A_DTYPE:
            return "dtype", self._dtype()
        if kind == form.A_NONE:
            return "value", None
        if kind > form.A_LIST:
            raise _damaged(f"an argument is of kind {kind}")
        plain = {
            form.A_BOOL: self._bool,
            form.A_INT: self._i64,
            form.A_FLOAT: self._f64,
            form.A_TEXT: self._text,
        }
        return "value", plain[kind]()

    def _reference(self) -> tuple[str, int]:
        number = self._u32()
        if number >= len(self._vals) or not isinstance(self._vals[number], tuple):
            raise _damaged(f"node {len(self._vals)} reads node {number}, which is no tensor")
        return "node", number

    def _form(self) -> tuple[tuple[int, ...], str] | None:
        code, rank = self._u8(), self._u8()
        if code == 0 and rank == 0:
            return None
        if rank > form.MOST_RANK:
            raise _damaged(f"a tensor has {rank} dimensions; at most {form.MOST_RANK}")
        shape = tuple(self._i64() for _ in range(rank))
        if any(size < 0 for size in shape) or math.prod(s or 1 for s in shape) > _MOST_ELEMENTS:
            raise _damaged(f"a tensor has the shape {shape}")
        return shape, _dtype_of(code)

    def _count(self, nbytes: int) -> int:
        """Read a count of entries of at least `nbytes` each; refuse more than the data can hold."""
        count = self._u32()
        if count * nbytes > len(self._data) - self._at:
            raise _damaged(f"it counts {count} entries at byte {self._at} of {len(self._data)}")
        return count

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise _damaged(f"it needs {nbytes} bytes at byte {self._at} of {len(self._data)}")
        part, self._at = self._data[self._at : end], end
        return part

    def _u8(self) -> int:
        return self._take(1)[0]

    def _u32(self) -> int:
        return int(form.U32.unpack(self._take(4))[0])

    def _i64(self) -> int:
        return int(form.I64.unpack(self._take(8))[0])

    def _f64(self) -> float:
        return float(form.F64.unpack(self._take(8))[0])

    def _bool(self) -> bool:
        value = self._u8()
        if value > 1:
            raise _damaged(f"a bool is 0 or 1, not {value}")
        return bool(value)

    def _dtype(self) -> str:
        return _dtype_of(self._u8())

    def _text(self) -> str:
        return self._string(self._u32())

    def _string(self, number: int) -> str:
        if number >= len(self._strings):
            raise _damaged(f"it names string {number} of {len(self._strings)}")
        return self._strings[number]


def _dtype_of(code: int) -> str:
    if not 0 < code <= len(form.DTYPES):
        raise _damaged(f"a dtype has the code {code}")
    return form.DTYPES[code - 1]


def _damaged(reason: str) -> BackendError:
    return BackendError(f"the serialised graph is damaged: {reason}")
