"""Sizes as people write them in a kernel's specification: `round_up(n, 64) / 4`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetpipe.errors import BackendError
from hetpipe.words import short, words

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MOST = 2**31 - 1
"""The largest size: an int of OpenCL C."""
MOST_LETTERS = 200
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "min": min,
    "max": max,
    "ceil_div": lambda size, part: -(-size // part),
    "round_up": lambda size, part: -(-size // part) * part,
}
GRAMMAR = "whole numbers, names, + - * // % and " + ", ".join(_FUNCTIONS)


@dataclass(frozen=True)
class Size:
    """A whole number, or an expression over named sizes."""

    text: str

    def __post_init__(self) -> None:
        """Raise `BackendError` for a text that is no expression of sizes."""
        self._tree()

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str | None:
        """The name, if the size is a single name; else None."""
        return self.text if self.text.isidentifier() else None

    def value(self, sizes: Mapping[str, int]) -> int:
        """Return the number for the named sizes.

        Raises `BackendError` for an unknown name, a division by 0, and a number below 0 or above
        `MOST`.
        """
        try:
            number = _value(self._tree(), sizes)
        except ZeroDivisionError as error:
            raise BackendError(f"size {self.text!r} divides by 0") from error
        if not 0 <= number <= MOST:
            raise BackendError(f"size {self.text!r} is {number}; it should be 0 to {MOST}")
        return number

    def _tree(self) -> ast.expr:
        if len(self.text) > MOST_LETTERS:
            raise BackendError(
                f"a size has {len(self.text)} letters, {MOST_LETTERS} at most; name a part of it"
            )
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BackendError(f"{short(self.text)} is no size; write {GRAMMAR}") from error
        _check(tree, self.text)
        return tree

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import PydanticCustomError
        from pydantic_core.core_schema import no_info_plain_validator_function

        def read(value: Any) -> Size:
            if isinstance(value, bool) or not isinstance(value, (int, str)):
                why = f"{short(value)} is no size; write {GRAMMAR}"
                raise PydanticCustomError("refused", "{why}", {"why": why})
            try:
                return Size(str(value))
            except BackendError as refused:
                raise PydanticCustomError("refused", "{why}", {"why": str(refused)}) from refused

        return no_info_plain_validator_function(read)


def _check(tree: ast.expr, text: str) -> None:
    """Raise `BackendError` if an expression has parts that sizes do not allow."""
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        _check(tree.left, text)
        _check(tree.right, text)
    elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        count = len(tree.args)
        if tree.func.id not in _FUNCTIONS or count < 2 or (count > 2 and "_" in tree.func.id):
            raise BackendError(f"{short(text)} is no size; write {GRAMMAR}")
        for each in tree.args:
            _check(each, text)
    elif not isinstance(tree, ast.Name) and not (
        isinstance(tree, ast.Constant) and type(tree.value) is int
    ):
        raise BackendError(f"{short(text)} is no size; write {GRAMMAR}")


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](_value(tree.left, sizes), _value(tree.right, sizes))
    if isinstance(tree, ast.Call):
        assert isinstance(tree.func, ast.Name)
        return _FUNCTIONS[tree.func.id](*(_value(each, sizes) for each in tree.args))
    if isinstance(tree, ast.Name):
        if tree.id not in sizes:
            raise BackendError(f"no size {tree.id!r}; known: {words(sizes) or 'none'}")
        return sizes[tree.id]
    assert isinstance(tree, ast.Constant)
    assert isinstance(tree.value, int)
    return tree.value
