"""Boards: hardware described by its data sheet, with the source of every number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

from hetpipe.errors import CostError
from hetpipe.records import Name, Number, OneOf, Parsed, Place, Positive, Source, read_text
from hetpipe.toml import Lines, parse_toml
from hetpipe.words import choices, near, short

KINDS = ("gpu", "fpga", "cpu")
CURRENCIES = ("USD", "EUR")
EXECUTIONS = ("sync", "async")
PEAK_DTYPES = ("float32", "float16", "bfloat16", "tensorfloat32")
MAC_DTYPES = ("float32", "float16", "int16")


@dataclass(frozen=True)
class Fabric:
    """The programmable part of an FPGA."""

    dsp: int  # DSP slices (AMD) or DSP blocks (Intel)
    clock_Hz: float  # clock that designs for deep learning reach
    on_chip_nbytes: int  # block and ultra RAM
    dsp_per_mac: dict[str, float]  # by dtype: "float32", "float16", "int16"
    usable: float  # share of the DSPs that a design can use
    efficiency: float  # share of the cycles in which the used DSPs do useful work


@dataclass(frozen=True)
class Offline:
    """The commands of the vendor's compiler for a board that need not be attached.

    `commands` fills in `{source}`, `{options}` and `{binary}`; in `kernel` also `{kernel}`, and in
    `program` also `{objects}`, the files that the `kernel` commands make.
    """

    compiler: str  # name of the compiler
    kernel: str  # command for each kernel; empty: only `program` is needed
    program: str  # command for the whole program
    binary: str  # suffix of the resulting file: "aocx"

    def commands(
        self, stem: str, source: str, options: Sequence[str], kernels: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the commands that make the file `stem`.`binary` of a source with these kernels."""
        names = {
            "source": source,
            "options": " ".join(options),
            "binary": f"{stem}.{self.binary}",
            "objects": " ".join(f"{kernel}.xo" for kernel in kernels),
        }
        each = [_filled(self.kernel, {**names, "kernel": kernel}) for kernel in kernels]
        return (*(each if self.kernel else ()), _filled(self.program, names))


def _filled(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return " ".join(text.split())


@dataclass(frozen=True)
class Price:
    """The maker's price of a board."""

    amount: float
    currency: str  # "USD" or "EUR"
    date: str  # when it was announced: "2022-09-20"


@dataclass(frozen=True)
class Board:
    """A graphics card, an FPGA board or a processor, by its data sheet."""

    id: str  # the file's stem: "v100-sxm-16"
    name: str
    kind: str  # "gpu", "fpga" or "cpu"
    execution: str  # "sync": sends complete results; "async": sends parts while it computes
    memory_nbytes: int
    memory_Bps: float
    peak_flops: dict[str, float]  # by dtype; a multiply-add counts as two; FPGA: empty
    launch_s: float  # fixed seconds of one kernel or pass
    host_Bps: float  # to the host, in one direction
    peer_Bps: float | None  # to an equal board by a direct link, in one direction; None: no link
    power_w: float | None  # most watts; None: not stated
    price: Price | None  # None: not stated
    fabric: Fabric | None  # of an FPGA
    offline: Offline | None  # for a board whose kernels are compiled beforehand
    sources: dict[str, str]  # source of each number, by its key in the file: "fabric.dsp"


def read_board(path: Path) -> Board:
    """Read a board from a TOML file. Raises `CostError` as `file:line: key and fault`."""
    text = read_text(path, CostError)
    data = parse_toml(text, path, CostError)
    lines = Lines(text)
    source = Source("the board", CostError, lambda at: f"{path}:{lines.at(at)}", _CURES)
    fabric: Fabric | None = None
    peak_flops: dict[str, float] = {}
    tables: _Tables
    if data.get("kind") == "fpga":
        tables = fpga = source.record(_Fpga, data)
        fabric = _fabric(fpga.fabric, source)
    else:
        tables = processor = source.record(_Processor, data)
        peak_flops = _by_dtype(processor.peak_flops, PEAK_DTYPES, ("peak_flops",), source)
    return Board(
        path.stem,
        tables.name,
        tables.kind,
        tables.execution,
        tables.memory_nbytes.value,
        tables.memory_Bps.value,
        peak_flops,
        tables.launch_s.value,
        tables.host_Bps.value,
        tables.peer_Bps.value or None,
        tables.power_w.value or None,
        _price(tables.price),
        fabric,
        _offline(tables.offline),
        dict(_sources(data)),
    )


def boards(folder: Path | None = None) -> dict[str, Board]:
    """Return the boards in `folder` by id; by default hetpipe's boards. Raises `CostError`."""
    if folder is None:
        return dict(_own_boards())
    if not folder.is_dir():
        raise CostError(f"{folder} is no folder; name a folder with a TOML file for each board")
    return {path.stem: read_board(path) for path in sorted(folder.glob("*.toml"))}


def board_ids() -> list[str]:
    """Return the ids of hetpipe's boards without reading them."""
    names = (Path(file.name) for file in files("hetpipe.boards").iterdir())
    return sorted(name.stem for name in names if name.suffix == ".toml")


def board(id: str) -> Board:
    """Return hetpipe's board with this id. Raises `CostError` if there is none."""
    return find_board(_own_boards(), id)


def find_board(boards: Mapping[str, Board], id: str) -> Board:
    """Return the board with this id. Raises `CostError`, with similar ids, if there is none."""
    if id not in boards:
        raise CostError(
            f"no board {short(id)}; {near(id, boards)}`hetpipe boards` lists all {len(boards)}"
        )
    return boards[id]


@cache
def _own_boards() -> dict[str, Board]:
    with as_file(files("hetpipe.boards")) as folder:
        return boards(folder)


@dataclass(frozen=True)
class _Whole:
    """A whole number and its source."""

    value: Positive
    source: Name


@dataclass(frozen=True)
class _Number:
    """A number above 0 and its source."""

    value: Annotated[float, Number(above=True)]
    source: Name


@dataclass(frozen=True)
class _Share:
    """A number above 0 and at most 1, and its source."""

    value: Annotated[float, Number(most=1.0, above=True)]
    source: Name


_ABSENT = _Number(0.0, "")


def day_of(text: str) -> str:
    """Return a date as 2022-09-20. Raises `CostError` for other text."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise CostError(f"{short(text)} is no date; write it as 2022-09-20") from None


@dataclass(frozen=True)
class _Price:
    """A price and its source."""

    amount: Annotated[float, Number(above=True)]
    currency: Annotated[str, OneOf(CURRENCIES)]
    date: Annotated[str, Parsed(day_of)]
    source: Name


@dataclass(frozen=True)
class _Offline:
    """The [offline] table."""

    compiler: Name
    program: Name
    binary: Name
    source: Name
    kernel: str = ""


@dataclass(frozen=True)
class _Tables:
    """The keys that the files of all kinds of boards have."""

    name: Name
    kind: Annotated[str, OneOf(KINDS)]
    execution: Annotated[str, OneOf(EXECUTIONS)]
    memory_nbytes: _Whole
    memory_Bps: _Number
    launch_s: _Number
    host_Bps: _Number
    peer_Bps: _Number = field(default=_ABSENT, kw_only=True)
    power_w: _Number = field(default=_ABSENT, kw_only=True)
    price: _Price | None = field(default=None, kw_only=True)
    offline: _Offline | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class _Processor(_Tables):
    """The file of a graphics card or a processor."""

    peak_flops: dict[str, _Number]


@dataclass(frozen=True)
class _Fabric:
    """The [fabric] table of an FPGA."""

    dsp: _Whole
    clock_Hz: _Number
    on_chip_nbytes: _Whole
    dsp_per_mac: dict[str, _Number]
    usable: _Share
    efficiency: _Share


@dataclass(frozen=True)
class _Fpga(_Tables):
    """The file of an FPGA board."""

    fabric: _Fabric


_NUMBERS = (
    *("memory_nbytes", "memory_Bps", "launch_s", "host_Bps", "peer_Bps", "power_w"),
    *("fabric.dsp", "fabric.clock_Hz", "fabric.on_chip_nbytes"),
    *("fabric.usable", "fabric.efficiency"),
    *(f"peak_flops.{dtype}" for dtype in PEAK_DTYPES),
    *(f"fabric.dsp_per_mac.{dtype}" for dtype in MAC_DTYPES),
)
_CURES = {
    key: f'write {key.rpartition(".")[2]} = {{ value = NUMBER, source = "TITLE OF A DOCUMENT" }}'
    for key in _NUMBERS
}


def _fabric(table: _Fabric, source: Source) -> Fabric:
    place: Place = ("fabric", "dsp_per_mac")
    return Fabric(
        table.dsp.value,
        table.clock_Hz.value,
        table.on_chip_nbytes.value,
        _by_dtype(table.dsp_per_mac, MAC_DTYPES, place, source),
        table.usable.value,
        table.efficiency.value,
    )


def _price(table: _Price | None) -> Price | None:
    return None if table is None else Price(table.amount, table.currency, table.date)


def _offline(table: _Offline | None) -> Offline | None:
    if table is None:
        return None
    return Offline(table.compiler, table.kernel, table.program, table.binary)


def _by_dtype(
    numbers: Mapping[str, _Number], known: tuple[str, ...], place: Place, source: Source
) -> dict[str, float]:
    """Return the numbers of a table whose keys are dtypes. Raises `CostError` for an unknown dtype,
    and if float32 is missing."""
    for dtype in numbers:
        if dtype not in known:
            why = f"has an unknown key {short(dtype)}; {choices(dtype, known)}"
            raise source.fault(place, why, dtype)
    if "float32" not in numbers:
        raise source.fault(place, "lacks the key 'float32', by which boards are compared")
    return {dtype: number.value for dtype, number in numbers.items()}


def _sources(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the full key and the source of every number in a file."""
    for key, entry in table.items():
        if isinstance(entry, Mapping) and "source" in entry:
            yield prefix + key, entry["source"]
        elif isinstance(entry, Mapping):
            yield from _sources(entry, f"{prefix}{key}.")
