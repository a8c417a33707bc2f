"""Tables for a terminal: devices, costs, links."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from io import StringIO, TextIOWrapper
from typing import TYPE_CHECKING

import rich.table
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hetpipe.html import table_html
from hetpipe.words import format_nbytes, format_s

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, JustifyMethod, RenderResult

    from hetpipe.cost.table import CostTable, DeviceCost
    from hetpipe.sdk.host.registry import Provider
    from hetpipe.sdk.info import DeviceInfo


READABLE = 20  # characters to which a column of text may shrink, if its words are shorter
FRAME = 3  # characters between the texts of two columns


def console(stderr: bool = False) -> Console:
    """Return a console that prints `:factory:` unchanged and escapes unprintable characters.

    If it is no terminal, its lines may have any length.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    made = Console(stderr=stderr, emoji=False)
    if not made.is_terminal:
        made.width = sys.maxsize
    return made


def plain_text(table: Table, width: int) -> str:
    """Return a table as text without colours, in lines of at most `width` characters."""
    made = Console(file=StringIO(), width=width, emoji=False, color_system=None)
    with made.capture() as captured:
        made.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Table:
    """Rows of text under a title, with every word in one piece.

    Columns that do not fit beside each other in a terminal follow below, in further parts. Each
    part begins with the first `keys` columns, which name the row.
    """

    def __init__(
        self, title: str, columns: Sequence[str], numbers: Collection[str] = (), keys: int = 1
    ) -> None:
        self.title = title
        self.columns = tuple(columns)
        self.rows: list[list[Text]] = []
        self._numbers = [column in numbers for column in columns]
        self._keys = keys
        self._ends: set[int] = set()

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; missing cells are empty. No text is read as markup: names have brackets."""
        row = [cell if isinstance(cell, Text) else Text(cell, style) for cell in cells]
        self.rows.append(row + [Text() for _ in self.columns[len(row) :]])

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self._ends.add(len(self.rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title and the parts, as wide as the console allows."""
        yield Text(self.title, "bold")
        for widths in self._parts(options.max_width):
            part = rich.table.Table()
            for index, width in widths.items():
                justify: JustifyMethod = "right" if self._numbers[index] else "left"
                head = Text(self.columns[index])
                part.add_column(head, justify=justify, width=width, overflow="fold")
            for number, row in enumerate(self.rows, 1):
                part.add_row(*(row[index] for index in widths), end_section=number in self._ends)
            yield part

    def _repr_html_(self) -> str:
        numbers = [name for name, is_number in zip(self.columns, self._numbers, strict=True)
                   if is_number]  # fmt: skip
        rows = [[cell.plain for cell in row] for row in self.rows]
        return table_html(self.title, self.columns, rows, numbers)

    def _parts(self, width: int) -> Iterator[dict[int, int]]:
        """Yield the columns of each part, by index, with their widths."""
        sizes = [self._size(index) for index in range(len(self.columns))]
        keys = dict(enumerate(sizes[: self._keys]))
        part = dict(keys)
        for index, size in list(enumerate(sizes))[self._keys :]:
            room = _room(width, len(part) + 1) - sum(least for least, _ in part.values())
            if size[0] > room and len(part) > len(keys):
                yield _fill(part, width)
                part = dict(keys)
                room = _room(width, len(part) + 1) - sum(least for least, _ in part.values())
            part[index] = (max(1, min(size[0], room)), size[1])
        yield _fill(part, width)

    def _size(self, index: int) -> tuple[int, int]:
        """Return the least and the greatest useful width of a column."""
        head, cells = self.columns[index], [row[index].plain for row in self.rows]
        word = _longest(word for text in (head, *cells) for word in text.split())
        full = _longest(line for text in (head, *cells) for line in text.splitlines())
        if self._numbers[index]:  # a number stays beside its unit
            return max(word, _longest(line for cell in cells for line in cell.splitlines())), full
        return max(word, min(full, READABLE)), full


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=1)


def _room(width: int, columns: int) -> int:
    """Return the characters for texts in a table of this width."""
    return width - FRAME * columns - 1


def _fill(part: Mapping[int, tuple[int, int]], width: int) -> dict[int, int]:
    """Return the widths of a part's columns: the narrowest ones grow first."""
    widths = {index: least for index, (least, _) in part.items()}
    for _ in range(sum(widths.values()), _room(width, len(part))):
        growing = [index for index, (_, full) in part.items() if widths[index] < full]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def device_table(
    infos: Sequence[DeviceInfo], joining: Collection[str], providers: Mapping[str, Provider]
) -> Table:
    """Return a table of devices; `joining` has the ids that a local cluster takes by default.

    `providers` has the origin of each backend.
    """
    columns = ("device", "kind", "memory", "joins", "times are", "domain", "provided by", "name")
    table = Table("Devices", columns, {"memory"})
    for info in infos:
        table.add_row(
            info.id,
            info.kind,
            format_nbytes(info.memory_nbytes),
            _joins(info, infos, joining),
            "emulated" if info.capabilities.emulated else "measured",
            info.memory_domain,
            str(providers[info.backend]),
            f"{info.name} ({info.driver})",
        )
    return table


def _joins(info: DeviceInfo, infos: Sequence[DeviceInfo], joining: Collection[str]) -> str:
    if info.id in joining:
        return "yes"
    same = [i.id for i in infos if i.id in joining and i.hardware and i.hardware == info.hardware]
    return f"when named (is {same[0]})" if same else "when named"


def cost_table(costs: CostTable) -> Table:
    """Return a table with the times of every layer on every device, for one micro-batch."""
    members = list(costs.devices)
    heads = [f"{member}, {costs.devices[member].label}" for member in members]
    columns = ["layer", *heads, "weights", "saved", "cut"]
    table = Table(
        f"Forward + backward per layer, micro-batches of {costs.samples}", columns, columns[1:]
    )
    for index, layer in enumerate(costs.layers):
        table.add_row(
            layer.name,
            *(_passes(costs.devices[member], index) for member in members),
            format_nbytes(layer.params_nbytes),
            format_nbytes(layer.saved_nbytes),
            format_nbytes(layer.cut_nbytes),
        )
    table.add_section()
    count = len(costs.layers)
    sums = [
        f"{format_s(costs.forward_s(member, 0, count))} + "
        f"{format_s(costs.backward_s(member, 0, count))}"
        for member in members
    ]
    table.add_row("all", *sums, "", "", "")
    return table


def link_table(costs: CostTable) -> Table:
    """Return a table with every link's latency and bandwidth, and its time for the largest cut."""
    largest = max((layer.cut_nbytes for layer in costs.layers), default=0)
    columns = (
        "from",
        "to",
        "latency",
        "bandwidth",
        f"{format_nbytes(largest)} take",
        "times are",
        "shares",
    )
    table = Table("Links", columns, columns[2:5], keys=2)
    for (source, target), link in costs.links.items():
        table.add_row(
            source,
            target,
            format_s(link.latency_s),
            f"{format_nbytes(link.bandwidth_Bps)}/s",
            format_s(link.time_s(largest)),
            link.label,
            ", ".join(link.media),
        )
    return table


def _passes(device: DeviceCost, index: int) -> Text | str:
    layer = device.layers[index]
    return Text(layer.reason, "red") if layer.reason else str(layer)
