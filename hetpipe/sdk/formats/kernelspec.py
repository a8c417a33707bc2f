"""The specification of a user's kernel, a TOML file: arguments, sizes and expected results.

Sizes are numbers or expressions, as people write them: `round_up(n, 64) // 4`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hetpipe.errors import BackendError
from hetpipe.records import Entries, Number, OneOf, Placed, Source, Whole, read_text, with_place
from hetpipe.sdk.info import DTYPE_NBYTES
from hetpipe.toml import Lines, parse_toml
from hetpipe.words import choices, short, word, words

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MOST = 2**31 - 1
"""The largest size, which is also the largest int of OpenCL C."""
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
        """Evaluate the expression; `sizes` has the numbers of its names.

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
                f"a size has {len(self.text)} letters; at most {MOST_LETTERS} are allowed, so put "
                "a name for a part of it, with its number, into each [[case]]"
            )
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BackendError(f"{short(self.text)} is no size; write {GRAMMAR}") from error
        _check(tree, self.text)
        return tree

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_plain_validator_function

        return no_info_plain_validator_function(lambda value: with_place(lambda: _size_of(value)))


def _size_of(value: Any) -> Size:
    """Return the size that a file gives as a number or a text. Raises `BackendError`."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise BackendError(f"{short(value)} is no size; write {GRAMMAR}")
    return Size(str(value))


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
            raise BackendError(f"no size {tree.id!r}; {choices(tree.id, sizes)}")
        return sizes[tree.id]
    assert isinstance(tree, ast.Constant)
    assert isinstance(tree.value, int)
    return tree.value


VALUES = ("normal", "uniform", "integers", "zeros", "ones", "arange")
CLASSES = ("exact", "ulp", "sum")
DTYPES = (*DTYPE_NBYTES, "uint16", "uint32", "uint64")
"""A training has no tensors of the last three dtypes, but a kernel may be tested with them."""
UNFILLED = "FILL IN"
"""Text that a draft has where the user must write a value."""
_CURES = {
    "argument": "write each argument as a table: [argument.x]",
    "case": "write the sizes of each case as a table: [[case]]",
    "global_size": 'write global_size = ["n"]',
    "define": "write the values of each macro as a list: [define] TILE = [8, 16]",
    "beside": "write every other kernel as a table: [beside.producer]",
}


@dataclass(frozen=True)
class Argument:
    """A kernel's parameter: a tensor (`shape`), int (`value`), float (`number`) or `local` memory.

    Exactly one of these four fields is given.
    """

    shape: tuple[Size, ...] | None = None
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    values: Annotated[str, OneOf(VALUES)] | None = None
    """Kind of an input's values. A tensor with `values` and `output` is read and written."""
    scale: Annotated[float, Number(1e-30, 1e30)] | None = None
    """Factor of `normal` values in a further run with other values. In this run `ones` become
    uniform numbers, unless `scale` is 1."""
    low: float = -1.0
    high: float = 1.0
    """Bounds of uniform numbers and of integers. Integers are below `high`; by default 0 and 1."""
    output: bool = False
    value: Size | None = None
    number: Annotated[float, Number(-1e30, 1e30)] | None = None
    local: Size | None = None
    """Number of elements in local memory."""
    input: Annotated[int, Whole(0, 99)] | None = None
    result: Annotated[int, Whole(0, 99)] | None = None
    """In a training: the place of this tensor among the operator's inputs or results."""

    def __post_init__(self) -> None:
        """Raise `BackendError` if the fields contradict each other."""
        forms = (self.shape, self.value, self.number, self.local)
        given = sum(form is not None for form in forms)
        if given != 1:
            raise BackendError(
                f"an argument has {given} of shape, value, number and local; write one: shape for "
                "a tensor, value for an int, number for a float, local for local memory"
            )
        if self.shape is None and (self.output or self.values is not None):
            raise BackendError("only a tensor has values or is an output; give it a shape")
        if self.scale is not None and not self.is_input:
            raise BackendError("scale is for the values of an input; remove it here")
        if self.low > self.high:
            raise BackendError(
                f"low is {self.low:g}, but high is {self.high:g}: low must not be larger"
            )

    @property
    def is_input(self) -> bool:
        """Whether the argument is a tensor that the kernel reads."""
        return self.shape is not None and (self.values is not None or not self.output)


@dataclass(frozen=True)
class Tolerance:
    """The error that an output may have.

    `exact`: none. `ulp`: `units` units in the last place of each element. `sum`: the error
    of a sum of `terms` terms, 16 * sqrt(terms) * eps * the largest magnitude of the output.
    """

    error: Annotated[str, OneOf(CLASSES)] = "sum"
    units: Annotated[float, Number(0.0, 1e6)] = 4.0
    terms: Size = field(default_factory=lambda: Size("1"))


Sizes = dict[str, Annotated[int, Whole(0, 2**31 - 1)]]
MOST_CASES = 10_000
"""The most cases of a specification; each combination of defined values counts as a case."""


@dataclass(frozen=True)
class Beside:
    """A launch of another kernel of the same source, at the same time, in a separate queue."""

    global_size: Annotated[tuple[Size, ...], Entries(1, 3)]
    local_size: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        """Raise `BackendError` if the sizes have unequal dimensions."""
        _same_dimensions(self.global_size, self.local_size)


def _same_dimensions(global_size: Sequence[Size], local_size: Sequence[Size]) -> None:
    if local_size and len(local_size) != len(global_size):
        raise BackendError(
            f"local_size has {len(local_size)} dimensions, global_size {len(global_size)}: give "
            "both the same number"
        )


@dataclass(frozen=True)
class KernelSpec:
    """A kernel's arguments, and the results that it should compute.

    `expect` has a numpy expression for each output, over the inputs (floats in float64) and sizes.
    Otherwise, `reference` names a function, `FILE.py:FUNCTION`, which takes inputs and sizes as
    keywords, and returns the output or a dict of several outputs.
    """

    argument: Annotated[dict[str, Annotated[Argument, Placed()]], Entries(1)]
    global_size: Annotated[tuple[Size, ...], Entries(1, 3)]
    case: Annotated[tuple[Sizes, ...], Entries(1)]
    function: str = ""
    options: tuple[str, ...] = ()
    local_size: tuple[Size, ...] = ()
    expect: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    tolerance: dict[str, Tolerance] = field(default_factory=dict)
    operator: str = ""
    """The operator that the kernel may replace in a training, such as `aten.relu.default`."""
    source: str = ""
    """For a training: the kernel's file, relative to the specification; default: NAME.cl."""
    time_limit_s: Annotated[float, Number(0.1, 3600.0)] = 20.0
    fixed: tuple[str, ...] = ()
    """Sizes, by name, that take only the values in the cases."""
    define: dict[str, Annotated[tuple[Annotated[int, Whole(0, 2**31 - 1)], ...], Entries(1)]] = (
        field(default_factory=dict)
    )
    """Values of macros: every case runs with each combination of them."""
    beside: dict[str, Annotated[Beside, Placed()]] = field(default_factory=dict)
    """Further kernels by name, which run at the same time, such as the other end of a channel."""

    def __post_init__(self) -> None:
        """Raise `BackendError` if parts of the specification do not fit together."""
        outputs = self.outputs
        if not outputs:
            raise BackendError("no argument is an output; write output = true in one")
        if bool(self.expect) == bool(self.reference):
            raise BackendError(
                f"it needs a table [expect] with an expression for {words(outputs)}, such as "
                f'{outputs[0]} = "2 * x", or reference = "FILE.py:FUNCTION", but not both'
            )
        for table in ("expect", "tolerance"):
            if unknown := [name for name in getattr(self, table) if name not in outputs]:
                raise BackendError(
                    f"{table} has {words(unknown)}, which is no output; outputs: {words(outputs)}"
                )
        if self.expect and (missing := [name for name in outputs if name not in self.expect]):
            raise BackendError(f"expect lacks the output {words(missing)}")
        _same_dimensions(self.global_size, self.local_size)
        named = {name for sizes in self.case for name in sizes}
        if unknown := [name for name in self.fixed if name not in named]:
            raise BackendError(f"fixed has {words(unknown)}, which no case has; remove it")
        for name in self.define:
            if not name.isidentifier() or name in named:
                raise BackendError(
                    f"define has {word(name)}, which is "
                    f"{'a size of a case' if name in named else 'no name of a macro'}; "
                    "choose another name"
                )
        count = len(self.case) * math.prod(map(len, self.define.values()))
        if count > MOST_CASES:
            raise BackendError(
                f"cases and values of define make {count} combinations; at most {MOST_CASES} are "
                "allowed"
            )

    @cached_property
    def cases(self) -> tuple[Mapping[str, int], ...]:
        """The sizes of every case, with each combination of the defined values."""
        choices = product(*self.define.values())
        macros = [dict(zip(self.define, chosen, strict=True)) for chosen in choices]
        return tuple({**sizes, **each} for each in macros for sizes in self.case)

    def options_of(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the compiler's options, with the defined values of a case."""
        return (*self.options, *(f"-D{name}={sizes[name]}" for name in self.define))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.argument.items() if each.is_input)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.argument.items() if each.output)

    def texts(self) -> Iterator[str]:
        """Yield the code that the specification runs: expressions, and the reference's name."""
        yield from self.expect.values()
        if self.reference:
            yield self.reference


def read_spec(path: Path) -> KernelSpec:
    """Read the specification in a TOML file. Raises `BackendError` as `path:line: fault`."""
    text = read_text(path, BackendError)
    data = parse_toml(text, path, BackendError)  # refuses texts that are nested too deeply
    places = [
        f"  {path}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if UNFILLED in line.partition("#")[0]
    ]
    if places:
        raise BackendError(
            "\n".join((f"{path} is a draft; replace {UNFILLED!r} in these lines:", *places))
        )
    lines = Lines(text)
    source = Source(
        "the specification", BackendError, lambda place: f"{path}:{lines.at(place)}", _CURES
    )
    return source.record(KernelSpec, data)
