"""`hetpipe boards`: lists hardware that is described by data sheets, with each number's source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output

if TYPE_CHECKING:
    from hetpipe.cost.board import Board
    from hetpipe.report.tables import Table


def command(
    id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="The id of a board, to print all its numbers.",
            autocompletion=complete.board,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", metavar="FOLDER", help="Read the boards from this folder's TOML files."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """List boards: GPUs, FPGAs and processors that are described by data sheets, for plans."""
    from dataclasses import asdict

    from hetpipe.cost.board import boards, find_board

    output = Output(json)
    every = boards(folder)
    chosen = every if id is None else {id: find_board(every, id)}
    output.console.print(_overview(chosen) if id is None else _page(chosen[id]))
    output.finish({"boards": [asdict(board) for board in chosen.values()]})


def _overview(boards: dict[str, Board]) -> Table:
    """Return a table of boards."""
    from hetpipe.report.tables import Table

    numbers = ("memory", "bandwidth", "to its host", "to such a board")
    table = Table(
        "Boards, with bytes per second one way", ("board", "kind", *numbers, "computes"), numbers
    )
    for board in boards.values():
        table.add_row(
            board.id,
            board.kind,
            _shown("memory_nbytes", board.memory_nbytes),
            _shown("memory_Bps", board.memory_Bps),
            _shown("host_Bps", board.host_Bps),
            "-" if board.peer_Bps is None else _shown("peer_Bps", board.peer_Bps),
            _arithmetic(board),
        )
    return table


def _page(board: Board) -> Table:
    """Return a table with a line for each number of a board, its price and its compiler."""
    from hetpipe.report.tables import Table

    title = f"{board.id}: {board.name} ({board.kind}, {board.execution})"
    table = Table(title, ("key", "value", "source"), ("value",))
    for key, source in board.sources.items():
        table.add_row(key, _value(board, key), source)
    return table


def _arithmetic(board: Board) -> str:
    if board.fabric is not None:
        return f"{board.fabric.dsp} DSP at {_shown('clock_Hz', board.fabric.clock_Hz)}"
    peaks = board.peak_flops.items()
    return ", ".join(f"{_shown('peak_flops', peak)} {dtype}" for dtype, peak in peaks)


def _value(board: Board, key: str) -> str:
    """Return the value of a key of the board's file, as text."""
    if key == "offline":
        assert board.offline is not None
        return board.offline.compiler
    if key == "price":
        assert board.price is not None
        return f"{board.price.amount:g} {board.price.currency}, {board.price.date}"
    return _shown(key, _number(board, key))


def _number(board: Board, key: str) -> float:
    """Return the number of a key such as `fabric.dsp`."""
    value: Any = board
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return float(value)


def _shown(key: str, value: float) -> str:
    """Format a number with the unit that its key implies."""
    from hetpipe.words import format_nbytes, format_s

    if key.endswith("_nbytes"):
        return format_nbytes(value)
    if key.endswith("_s"):
        return format_s(value)
    if key.endswith("_w"):
        return f"{value:g} W"
    if "dsp" in key:
        return f"{value:g} DSP"
    for part, unit in (("_Bps", "B/s"), ("_Hz", "Hz"), ("peak_flops", "FLOP/s")):
        if part in key:
            return _prefixed(value, unit)
    return f"{100 * value:.3g} %"


def _prefixed(value: float, unit: str) -> str:
    """Format a number with an SI prefix: 9e11 B/s -> "900 GB/s"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
