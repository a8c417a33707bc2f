"""A graph as bytes that any language can read: the serialised form, version 1.

Little-endian, without padding; `u8`, `u32`, `i64` and `f64` are numbers of that many bits. Strings,
nodes and counts are `u32`: a string is its place in the table of strings, a node the number of an
earlier node.

    header   "HETGRAPH", u32 version = 1, u32 bytes in all, u32 CRC-32 of the bytes that follow it,
             u32 number of strings, u32 bytes of all strings, u32 number of nodes
    strings  each in UTF-8, with a zero byte at its end and none inside
    nodes    in order; each is u8 kind, string name, string layer (or NONE), and by its kind
      1 input   u8 flags; with flag 2, i64 low and i64 size; with flag 4, i64 ignored value; form.
                Flag 1: the input is steady. Flag 2: the host has checked that the integers are in
                low..size-1. Flag 4: they may also equal the ignored value
      2 call    string operator; count, argument...; count, (string name, argument)...;
                u8 several; a form, or if several: count, form...
      3 item    node of a call with several results, u32 number of the result; form
      4 output  count, node...; the last node, and the only one of its kind
    form     u8 dtype (0: no tensor), u8 rank, i64 size...
    argument u8 kind, then 0 none, 1 bool: u8, 2 integer: i64, 3 number: f64, 4 text: string,
             5 dtype: u8, 6 tensor: node, 7 list: count, argument...

A graph means the same as in `hetpipe.sdk.graph`; docs/native.md explains it for readers in other
languages. Later versions of hetpipe read the graphs of all earlier versions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetpipe.errors import BackendError

if TYPE_CHECKING:
    from torch import fx

MAGIC = b"HETGRAPH"
VERSION = 1
NONE = 0xFFFFFFFF
"""Stands for the layer of a node without a layer."""
MOST_DEPTH = 8
"""The deepest nesting of lists."""
MOST_RANK = 32
"""The most dimensions of a tensor."""
DTYPES = (
    "float32", "float64", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""The dtypes of codes 1, 2, ...; new dtypes go at the end."""

INPUT, CALL, ITEM, OUTPUT = 1, 2, 3, 4
STEADY, CHECKED, IGNORED = 1, 2, 4
A_NONE, A_BOOL, A_INT, A_FLOAT, A_TEXT, A_DTYPE, A_NODE, A_LIST = range(8)

HEADER = struct.Struct("<8sIIIIII")
CHECKED_FROM = 20
"""The first byte that the checksum covers."""
U32, I64, F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")


def serialise(graph: fx.GraphModule | fx.Graph) -> bytes:
    """Serialise a canonical graph. Raises `BackendError` if it is not canonical."""
    from hetpipe.sdk.graph import graph_rows

    return serialise_rows(graph_rows(graph))


def serialise_rows(rows: Sequence[tuple[Any, ...]]) -> bytes:
    """Serialise the rows of `graph_rows`. Raises `BackendError`."""
    writer = _Writer()
    for row in rows:
        writer.node(row)
    strings = b"".join(text.encode() + b"\0" for text in writer.strings)
    counts = struct.pack("<III", len(writer.strings), len(strings), len(rows))
    body = counts + strings + bytes(writer.data)
    nbytes = CHECKED_FROM + len(body)
    if nbytes > NONE:
        raise BackendError(f"a graph of {nbytes} bytes is too large: at most {NONE} are allowed")
    return struct.pack("<8sIII", MAGIC, VERSION, nbytes, zlib.crc32(body)) + body


class _Writer:
    """Writes rows of `graph_rows` as bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.strings: dict[str, int] = {}
        self._several: list[int] = []  # by row: the number of its results, or 0 for one tensor

    def node(self, row: tuple[Any, ...]) -> None:
        op, name, target, args, kwargs, val, layer, steady, checked = row
        kind = {"placeholder": INPUT, "output": OUTPUT}.get(op, CALL)
        if kind == CALL and target == "getitem":  # the name of an input may also be getitem
            kind = ITEM
        self.data.append(kind)
        self._text(name)
        if layer is None:
            self._u32(NONE)
        else:
            self._text(layer)
        if kind == INPUT:
            self._input(steady, checked)
            self._form(val)
        elif kind == CALL:
            self._call(target, args[1], kwargs, val)
        elif kind == ITEM:
            self._item(name, args[1])
            self._form(val)
        else:
            outputs = args[1][0][1]
            self._u32(len(outputs))
            for tag, number in outputs:
                if tag != "node":
                    raise BackendError(f"graph is not canonical: it returns {number!r}, no node")
                self._u32(number)
        self._several.append(len(val) if isinstance(val, list) else 0)

    def _input(self, steady: bool, checked: tuple[int, int, int | None] | None) -> None:
        low, size, ignored = checked or (0, 0, None)
        flags = (STEADY if steady else 0) | (CHECKED if checked is not None else 0)
        self.data.append(flags | (IGNORED if ignored is not None else 0))
        if checked is not None:
            for value in (low, size) if ignored is None else (low, size, ignored):
                self._i64(value)

    def _call(self, target: str, args: Any, kwargs: dict[str, Any], val: Any) -> None:
        self._text(target)
        self._u32(len(args))
        for arg in args:
            self._argument(arg, 0)
        self._u32(len(kwargs))
        for key, arg in kwargs.items():
            self._text(key)
            self._argument(arg, 0)
        self.data.append(isinstance(val, list))
        if isinstance(val, list):
            self._u32(len(val))
        for item in val if isinstance(val, list) else [val]:
            self._form(item)

    def _item(self, name: str, args: list[tuple[str, Any]]) -> None:
        (tag, number), (_, index) = args
        several = self._several[number] if tag == "node" else 0
        if not (isinstance(index, int) and 0 <= index < several):
            raise BackendError(f"graph is not canonical: {name} is item {index} of {several}")
        self._u32(number)
        self._u32(index)

    def _argument(self, packed: tuple[str, Any], depth: int) -> None:
        tag, value = packed
        if tag == "list":
            if depth == MOST_DEPTH:
                raise BackendError(f"graph is not canonical: lists deeper than {MOST_DEPTH}")
            self.data.append(A_LIST)
            self._u32(len(value))
            for item in value:
                self._argument(item, depth + 1)
        elif tag == "node":
            self.data.append(A_NODE)
            self._u32(value)
        elif tag == "dtype":
            self.data += bytes([A_DTYPE, _dtype_code(value)])
        elif value is None:
            self.data.append(A_NONE)
        elif isinstance(value, bool):
            self.data += bytes([A_BOOL, value])
        elif type(value) is int:
            self.data.append(A_INT)
            self._i64(value)
        elif type(value) is float:
            self.data.append(A_FLOAT)
            self.data += F64.pack(value)
        elif type(value) is str:
            self.data.append(A_TEXT)
            self._text(value)
        else:
            kind = type(value).__name__
            raise BackendError(f"graph is not canonical: an argument is a {kind}, {value!r}")

    def _form(self, val: Any) -> None:
        if val is None:
            self.data += b"\0\0"
            return
        shape, dtype = val
        if len(shape) > MOST_RANK:
            raise BackendError(f"a tensor has {len(shape)} dimensions; at most {MOST_RANK} fit")
        self.data += bytes([_dtype_code(dtype), len(shape)])
        for size in shape:
            self._i64(size)

    def _text(self, text: str) -> None:
        if "\0" in text:
            raise BackendError(f"graph is not canonical: there is a zero byte in {text!r}")
        self._u32(self.strings.setdefault(text, len(self.strings)))

    def _u32(self, value: int) -> None:
        self.data += U32.pack(value)

    def _i64(self, value: int) -> None:
        if not -(1 << 63) <= value < 1 << 63:
            raise BackendError(f"graph is not canonical: {value} needs more than 64 bits")
        self.data += I64.pack(value)


def _dtype_code(name: str) -> int:
    if name not in DTYPES:
        raise BackendError(f"the serialised form has no dtype {name}; it has {', '.join(DTYPES)}")
    return DTYPES.index(name) + 1
