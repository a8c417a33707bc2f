"""Tables for a terminal: devices, costs, links."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hetpipe.cost.table import CostTable, DeviceCost
    from hetpipe.sdk.host.registry import Provider
    from hetpipe.sdk.info import DeviceInfo


def format_s(time_s: float) -> str:
    """0.00123 -> "1.23 ms"; infinite -> "-"."""
    if math.isinf(time_s):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if time_s * factor >= 1.0:
            return f"{time_s * factor:.3g} {unit}"
    return f"{time_s * 1e6:.3g} us"


def format_nbytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def format_rate(per_s: float) -> str:
    """1234.5 -> "1234/s"; small rates keep three digits."""
    return f"{per_s:.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


class _PlainTable(Table):
    """A table that reads no text as markup, because users' names may contain brackets or colons."""

    def add_row(self, *renderables: RenderableType | None, **options: Any) -> None:
        plain = (Text(cell) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*plain, **options)


def make_table(title: str, columns: Sequence[str], numbers: Collection[str] = ()) -> Table:
    """Return an empty table; the columns in `numbers` are aligned at the right."""
    table = _PlainTable(title=Text(title, "bold"), title_justify="left")
    for column in columns:
        table.add_column(Text(column), justify="right" if column in numbers else "left")
    return table


def device_table(
    infos: Sequence[DeviceInfo], joining: Collection[str], providers: Mapping[str, Provider]
) -> Table:
    """Return a table of devices; `joining` has the ids that a local cluster takes by default.

    `providers` has the origin of each backend.
    """
    columns = ("device", "kind", "name", "memory", "domain", "joins", "times are", "provided by")
    table = make_table("Devices", columns, {"memory"})
    for info in infos:
        table.add_row(
            info.id,
            info.kind,
            f"{info.name} ({info.driver})",
            format_nbytes(info.memory_nbytes),
            info.memory_domain,
            _joins(info, infos, joining),
            "emulated" if info.capabilities.emulated else "measured",
            str(providers[info.backend]),
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
    table = make_table(
        f"Forward + backward per layer, micro-batches of {costs.samples}", columns, columns[1:]
    )
    for index, layer in enumerate(costs.layers):
        table.add_row(
            layer.name,
            *(_passes(costs.devices[member], index) for member in members),
            format_nbytes(layer.params_nbytes),
            format_nbytes(layer.saved_nbytes),
            format_nbytes(layer.cut_nbytes),
            end_section=index == len(costs.layers) - 1,
        )
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
    columns = ("from", "to", "latency", "bandwidth", f"{format_nbytes(largest)} take", "times are")
    table = make_table("Links", columns, columns[2:5])
    for (source, target), link in costs.links.items():
        table.add_row(
            source,
            target,
            format_s(link.latency_s),
            f"{format_nbytes(link.bandwidth_Bps)}/s",
            format_s(link.time_s(largest)),
            link.label,
        )
    return table


def _passes(device: DeviceCost, index: int) -> Text | str:
    layer = device.layers[index]
    if layer.reason:
        return Text(layer.reason, "red")
    return f"{format_s(layer.forward_s)} + {format_s(layer.backward_s)}"
