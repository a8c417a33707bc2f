"""Executes a work-group of compiled code (PTX) on integers alone, to count its instructions.

The control flow and the addresses of the kernels depend on no element of a tensor, so floats are
not computed, and every element that is loaded counts as 0. An instruction is executed for all
work-items at once, as an operation on arrays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

WARP, SECTOR_NBYTES, BANKS = 32, 32, 32
MOST_STEPS = 400_000
"""Most instructions of a group; a longer kernel is not counted."""
Lanes = np.ndarray[Any, np.dtype[np.int64]]
KINDS = (
    ("free", r"mov|ld\.param|cvta|bra\.uni|ret"),
    ("memory", r"ld|st|atom|red"),
    ("special", r"ex2|lg2|rcp|rsqrt|sqrt|sin|cos|div\.\w+\.f"),
    ("float", r"(fma|add|sub|mul|min|max|neg|abs|setp\.\w+|selp)\.(\w+\.)*f32"),
    ("integer", r""),
)
"""Kinds of instructions by the beginnings of their names; the assembler removes the free ones."""
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
           "eq": np.equal, "ne": np.not_equal}  # fmt: skip
PLAIN = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or,
         "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum}  # fmt: skip


class Group:
    """A work-group in the middle of a launch."""

    def __init__(
        self, ptx: str, sizes: Sequence[int], local: Sequence[int], args: Sequence[int | float]
    ) -> None:
        """`args` are the kernel's numbers and the addresses of its tensors."""
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str, str, list[str]]] = []
        self._parse(ptx[ptx.index("{") + 1 :])
        self.size = prod(local)
        self.args = [arg if isinstance(arg, int) else int(arg != 0) for arg in args]
        self.registers: dict[str, Lanes] = {}
        places = np.unravel_index(np.arange(self.size), tuple(reversed(local)))[::-1]
        for axis, name in enumerate("xyz"):
            here = axis < len(local)
            count = sizes[axis] // local[axis] if here else 1
            self._set(f"%tid.{name}", places[axis] if here else 0)
            self._set(f"%ntid.{name}", local[axis] if here else 1)
            self._set(f"%nctaid.{name}", count)
            self._set(f"%ctaid.{name}", count // 2)
        self.issued: Counter[str] = Counter()
        """Instructions of warps, by kind."""
        self.operations = 0
        """Additions and multiplications of floats."""
        self.sectors = self.wavefronts = self.widest_nbytes = 0
        """Sectors of global memory; passes through local memory's banks; a work-item's widest
        access of global memory."""

    def run(self) -> None:
        """Execute the group. Raises `NotImplementedError` for an unknown or endless kernel."""
        at, end, steps = np.zeros(self.size, np.int64), len(self.code), 0
        while (now := int(at.min())) < end:
            active = at == now
            others = at[~active]
            stop = min(end, int(others.min())) if len(others) else end
            warps = int((np.add.reduceat(active, range(0, self.size, WARP)) > 0).sum())
            while now < stop:
                steps += 1
                if steps > MOST_STEPS:
                    raise NotImplementedError(f"more than {MOST_STEPS} instructions")
                guard, op, args = self.code[now]
                now += 1
                taken = active
                if guard:
                    taken = active & ((self._value(guard.lstrip("!")) != 0) ^ (guard[0] == "!"))
                kind = next(name for name, begin in KINDS if re.match(begin, op))
                self.issued[kind] += warps
                if kind == "memory":
                    self._access(op, args, taken)
                if kind == "float" and op.startswith(("fma", "add", "sub", "mul")):
                    self.operations += int(active.sum()) * (1 + op.startswith("fma"))
                if op.startswith(("bra", "ret")):
                    at[active] = now
                    at[taken] = end if op == "ret" else self.labels[args[0]]
                    break
                self._execute(op, args, taken)
            else:
                at[active] = now

    def _parse(self, body: str) -> None:
        for line in body.splitlines():
            line = line.split("//")[0].strip().rstrip(";")
            if line.endswith("}") and line.startswith("{ "):  # a scope of one line
                line = line[1:-1]
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif found := re.fullmatch(r"(?:@(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", line):
                args = re.split(r",\s*(?![^{]*\})", found[3])
                self.code.append((found[1] or "", found[2], args))

    def _set(self, name: str, value: Any, where: Lanes | None = None) -> None:
        whole = np.broadcast_to(np.asarray(value, np.int64), self.size)
        if where is not None and not where.all():
            whole = np.where(where, whole, self.registers.get(name, np.int64(0)))
        self.registers[name] = whole

    def _value(self, name: str) -> Lanes:
        """Return a register, a number, or 0 for the address of a symbol and for a float."""
        if name in self.registers:
            return self.registers[name]
        number = int(name, 0) if re.fullmatch(r"-?(0x[\da-f]+|\d+)", name) else 0
        return np.full(self.size, number, np.int64)

    def _access(self, op: str, args: Sequence[str], active: Lanes) -> None:
        vector, bits = re.search(r"\.v(\d)\.", op), re.search(r"\d+$", op)
        nbytes = int(vector[1] if vector else 1) * int(bits[0] if bits else 32) // 8
        place = next(arg for arg in args if arg.startswith("["))[1:-1]
        base, _, offset = place.partition("+")
        addresses = self._value(base) + int(offset or 0)
        for first in range(0, self.size, WARP):
            mine = addresses[first : first + WARP][active[first : first + WARP]]
            if not len(mine):
                continue
            if ".shared" in op:
                words = np.unique((mine[:, None] + np.arange(0, nbytes, 4)) // 4)
                self.wavefronts += int(np.bincount(words % BANKS).max())
            elif ".local" not in op and ".const" not in op:
                ends = np.concatenate([mine, mine + nbytes - 1]) // SECTOR_NBYTES
                self.sectors += len(np.unique(ends))
                self.widest_nbytes = max(self.widest_nbytes, nbytes)

    def _execute(self, op: str, args: Sequence[str], active: Lanes) -> None:
        root, *rest = op.split(".")
        if root == "call":
            raise NotImplementedError("a call of a function")
        if root in ("st", "red", "bar", "membar", "prefetch"):
            return
        if root == "ld":
            found = re.fullmatch(r"\[\w+_param_(\d+)\]", args[1])
            number = self.args[int(found[1])] if found else 0
            for name in _names(args[0]):
                self._set(name, number, active)
        elif args[0].startswith("{"):  # mov.b64 {low, high}, both
            low, high = _names(args[0])
            both = self._value(args[1])
            self._set(low, _wrapped(both, 32), active)
            self._set(high, both >> 32, active)
        elif args[0].startswith("%f") or re.match("atom", root):
            self._set(args[0], 0, active)
        else:
            values = [self._value(name) for name in args[1:]]
            self._set(args[0], _result(root, rest, values), active)


def _names(text: str) -> Iterator[str]:
    return (name.strip() for name in text.strip("{}").split(","))


def _wrapped(value: Lanes, bits: int) -> Lanes:
    """Return the lower bits as a signed number."""
    if bits >= 64:
        return value
    value = value & ((1 << bits) - 1)
    return value - ((value >> (bits - 1)) << bits)


def _result(root: str, rest: Sequence[str], values: list[Lanes]) -> Any:
    """Return the result of an instruction on integers or predicates."""
    kind = rest[-1] if rest else "b64"
    bits = 1 if kind == "pred" else int(re.sub(r"\D", "", kind) or 64)
    if kind[0] == "u" and bits < 64 and root != "selp":
        values = [value & ((1 << bits) - 1) for value in values]
    a, b = values[0], values[1] if len(values) > 1 else values[0]
    if root == "setp":
        name = rest[0].rstrip("u") if kind[0] == "f" else rest[0]
        return COMPARE[name](a, b) if name in COMPARE else name == "num"
    if root == "selp":
        return np.where(values[2] != 0, a, b)
    if kind == "pred":
        return {"and": a & b, "or": a | b, "xor": a ^ b, "not": 1 - a, "mov": a}[root]
    if root == "cvt":
        return _wrapped(np.zeros_like(a) if kind[0] == "f" else a, int(rest[-2][1:]))
    if root in ("mov", "cvta"):
        return a
    if root in ("mul", "mad"):
        product = a * b
        if "hi" in rest:
            product = (
                ((a.view("u8") * b.view("u8")) >> np.uint64(bits)).view("i8")
                if (kind[0] == "u")
                else product >> bits
            )
        product = product + values[2] if root == "mad" else product
        return product if "wide" in rest else _wrapped(product, bits)
    if root in ("div", "rem"):
        safe = np.where(b == 0, 1, b)
        quotient = np.sign(a) * np.sign(safe) * (abs(a) // abs(safe))
        return quotient if root == "div" else a - quotient * safe
    if root == "shl":
        return _wrapped(a << b, bits)
    if root == "shr":
        return _wrapped(a >> b, bits)
    if root in ("not", "neg", "abs"):
        return _wrapped({"not": ~a, "neg": -a, "abs": abs(a)}[root], bits)
    if root in PLAIN:
        return _wrapped(PLAIN[root](a, b), bits)
    raise NotImplementedError(f"instruction {root}.{'.'.join(rest)}")
