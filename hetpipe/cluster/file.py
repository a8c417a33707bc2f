"""The cluster file: TOML to `Cluster`, with errors that point at the line."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hetpipe.cluster import cluster
from hetpipe.cluster.cluster import Cluster, Link, Member
from hetpipe.cluster.transports import TRANSPORTS
from hetpipe.errors import ClusterError
from hetpipe.records import (
    Count,
    Entries,
    Name,
    Number,
    OneOf,
    Parsed,
    Place,
    Source,
    read_text,
    short,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
            "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*"
MOST_S = 1e9
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


CURES = {
    "device": "write each as a [[device]] table",
    "device.device": 'write device = "backend:name:index"',
    "device.cores": "write whole numbers: cores = [0, 1]",
    "device.speed": "write a number above 0, at most 1",
    "link": "write each as a [[link]] table",
    "link.between": 'write between = ["one", "other"]',
}


def parse_bandwidth(text: str) -> float:
    """Bytes per second of `1 Gb/s`, `250 MB/s`, `2 GiB/s` (b: bits, B: bytes).

    Raises `ClusterError`.
    """
    match = re.fullmatch(rf"{NUMBER}([kKMGT]?i?)(b|B)/s", text.strip())
    if match is None or match[2] not in PREFIXES:
        raise ClusterError(
            f"bandwidth {short(text)}: write a number and b/s (bits) or B/s (bytes), with "
            f'{" ".join(prefix for prefix in PREFIXES if prefix)} before it: "1 Gb/s"'
        )
    bandwidth_Bps = float(match[1]) * PREFIXES[match[2]] / (8 if match[3] == "b" else 1)
    if not 0 < bandwidth_Bps < math.inf:
        raise ClusterError(f"bandwidth is {bandwidth_Bps} B/s, must be above 0 and finite")
    return bandwidth_Bps


def parse_time(text: str) -> float:
    """Seconds of `1 ms`. Raises `ClusterError`."""
    match = re.fullmatch(rf"{NUMBER}([a-z]+)", text.strip())
    if match is None or match[2] not in SECONDS:
        raise ClusterError(
            f'latency {short(text)}: write a number and one of {", ".join(SECONDS)}: "1 ms"'
        )
    time_s = float(match[1]) * SECONDS[match[2]]
    if time_s > MOST_S:
        raise ClusterError(f"latency is {time_s} s, must be at most {MOST_S:g}")
    return time_s


def parse_link(text: str) -> Link:
    """A link of `1 Gb/s, 1 ms`: bandwidth, latency. Raises `ClusterError`."""
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise ClusterError(f'link {text!r}: write bandwidth and latency, as "1 Gb/s, 1 ms"')
    return Link(parse_time(latency), parse_bandwidth(bandwidth))


@dataclass(frozen=True)
class _Device:
    """A [[device]] table."""

    device: Name
    id: Name = ""  # empty: the device's id
    cores: tuple[Count, ...] = ()
    speed: Annotated[float, Number(0.0, 1.0, above=True)] = 1.0


@dataclass(frozen=True)
class _Link:
    """A [[link]] table."""

    between: Annotated[tuple[Name, ...], Entries(2, 2)]
    bandwidth: Annotated[float | None, Parsed(parse_bandwidth)] = None
    latency: Annotated[float | None, Parsed(parse_time)] = None


@dataclass(frozen=True)
class _Tables:
    """The whole file."""

    transport: Annotated[str, OneOf(TRANSPORTS)] = "auto"
    device: tuple[_Device, ...] = ()
    link: tuple[_Link, ...] = ()


def load(path: Path) -> Cluster:
    """Read and check a cluster file. Raises `ClusterError` as `file:line: place and fault`."""
    text = read_text(path, ClusterError)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ClusterError(f"{path}:{line[1] if line else 1}: {error}") from error
    except ValueError as error:  # a whole number too long for Python
        raise ClusterError(f"{path}:1: {error}") from error
    except RecursionError as error:
        raise ClusterError(f"{path}:1: values are nested too deeply; make it flat") from error
    lines = _Lines(text)
    source = Source("the cluster", ClusterError, lambda at: f"{path}:{lines.at(at)}", CURES)
    tables = source.record(_Tables, data)
    ids = [table.id or table.device for table in tables.device]
    _check_devices(tables, ids, source)
    links = _links(tables, ids, source)
    members = tuple(
        Member(id, table.device, table.cores, table.speed)
        for id, table in zip(ids, tables.device, strict=True)
    )
    places = {id: f"{path}:{lines.at(('device', index, 'device'))}" for index, id in enumerate(ids)}
    return Cluster(members, links, tables.transport, places)


def _check_devices(tables: _Tables, ids: list[str], source: Source) -> None:
    """Raises `ClusterError` for ids that are used twice and for cores that do not exist."""
    if not ids:
        raise source.fault((), "has no device; give it one or more [[device]] tables")
    for index, table in enumerate(tables.device):
        if ids[index] in ids[:index]:
            why = f"is {short(ids[index])}: two devices have the id, and ids are unique"
            raise source.fault(("device", index, "id" if table.id else "device"), why)
        absent = sorted(set(table.cores) - set(cluster.available_cores()))
        if absent:
            there = ", ".join(map(str, cluster.available_cores()))
            why = f"has cores {short(absent)}, which are not among this machine's: {there}"
            raise source.fault(("device", index, "cores"), why)


def _links(tables: _Tables, ids: list[str], source: Source) -> dict[frozenset[str], Link]:
    links: dict[frozenset[str], Link] = {}
    for index, table in enumerate(tables.link):
        for end, id in enumerate(table.between):
            if id not in ids:
                why = f"names no device: {short(id)}; there is {', '.join(ids)}"
                raise source.fault(("link", index, "between", end), why)
        pair = frozenset(table.between)
        if len(pair) != 2:
            why = f"is {short(table.between)}: a link joins two different devices"
            raise source.fault(("link", index, "between"), why)
        if pair in links:
            why = f"is a second link between {' and '.join(sorted(pair))}"
            raise source.fault(("link", index), why)
        links[pair] = Link(table.latency, table.bandwidth)
    return links


class _Lines:
    """Lines of a TOML text: finds a table by counting headers."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def at(self, place: Place) -> int:
        """The line that sets the value at a place, or opens its table; else 1."""
        if not place:
            return 1
        kind, *rest = place
        if not rest or not isinstance(rest[0], int):
            return self._find(str(kind), 1)
        header = self._header(str(kind), rest[0])
        if header is None:  # the file writes tables in another way
            return self._find(str(kind), 1)
        return self._find(str(rest[1]), header, inside=True) if len(rest) > 1 else header

    def _header(self, kind: str, index: int) -> int | None:
        """Line of the index-th [[kind]]."""
        header = re.compile(rf"\s*\[\[\s*{kind}\s*\]\]")
        numbers = [n for n, text in enumerate(self._lines, 1) if header.match(text)]
        return numbers[index] if index < len(numbers) else None

    def _find(self, key: str, start: int, inside: bool = False) -> int:
        """First line from `start` on that sets `key` (or opens a table of it); else `start`.

        With `inside`, `start` is the header of a table, and the search ends at the next header.
        """
        setting = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*(=|\.|\])""")
        for number in range(start + inside, len(self._lines) + 1):
            text = self._lines[number - 1]
            if inside and _is_header(text):
                break
            if setting.match(text):
                return number
        return start


def _is_header(line: str) -> bool:
    return line.lstrip().startswith("[[")
