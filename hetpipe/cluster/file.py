"""The cluster file: TOML to `Cluster`, with errors that point at the line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hetpipe.cluster.cluster import Cluster, Link, Member
from hetpipe.errors import ClusterError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

TOP_KEYS = ("transport", "device", "link")
DEVICE_KEYS = ("id", "device", "cores", "speed")
LINK_KEYS = ("between", "bandwidth", "latency")

PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
            "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*"
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Bytes per second of `1 Gb/s`, `250 MB/s`, `2 GiB/s` (b: bits, B: bytes).

    Raises `ClusterError`.
    """
    match = re.fullmatch(rf"{NUMBER}([kKMGT]?i?)(b|B)/s", text.strip())
    if match is None or match[2] not in PREFIXES:
        raise ClusterError(
            f"bandwidth {text!r}: write a number and b/s (bits) or B/s (bytes), with "
            f'{" ".join(prefix for prefix in PREFIXES if prefix)} before it: "1 Gb/s"'
        )
    return float(match[1]) * PREFIXES[match[2]] / (8 if match[3] == "b" else 1)


def parse_time(text: str) -> float:
    """Seconds of `1 ms`. Raises `ClusterError`."""
    match = re.fullmatch(rf"{NUMBER}([a-z]+)", text.strip())
    if match is None or match[2] not in SECONDS:
        raise ClusterError(
            f'latency {text!r}: write a number and one of {", ".join(SECONDS)}: "1 ms"'
        )
    return float(match[1]) * SECONDS[match[2]]


def parse_link(text: str) -> Link:
    """A link of `1 Gb/s, 1 ms`: bandwidth, latency. Raises `ClusterError`."""
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise ClusterError(f'link {text!r}: write bandwidth and latency, as "1 Gb/s, 1 ms"')
    return Link(parse_time(latency), parse_bandwidth(bandwidth))


def load(path: Path) -> Cluster:
    """Read and check a cluster file. Raises `ClusterError` as `file:line: what`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ClusterError(f"{path}:{line[1] if line else 1}: {error}") from error
    return _File(path, text).cluster(data)


class _File:
    """The text beside the parsed data: a table's line is found by counting its headers."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def cluster(self, data: Mapping[str, Any]) -> Cluster:
        self._check_keys(data, TOP_KEYS, 1)
        tables = {"device": data.get("device", []), "link": data.get("link", [])}
        for kind, found in tables.items():
            if not (isinstance(found, list) and all(isinstance(item, dict) for item in found)):
                self._fail(self._find(kind, 1), f"write each {kind} as a [[{kind}]] table")
        members: list[Member] = []
        places: dict[str, str] = {}
        for index, table in enumerate(tables["device"]):
            line = self._header("device", index)
            members.append(self._member(table, line, members))
            places[members[-1].id] = f"{self._path}:{self._find('device', line + 1)}"
        ids = [member.id for member in members]
        links: dict[frozenset[str], Link] = {}
        for index, table in enumerate(tables["link"]):
            line = self._header("link", index)
            pair = self._between(table, line, ids)
            if pair in links:
                self._fail(line, f"a second link between {' and '.join(sorted(pair))}")
            links[pair] = self._link(table, line, pair, ids)
        transport = self._value(data, "transport", str, "auto", 1)
        return self._checked(
            self._find("transport", 1), lambda: Cluster(tuple(members), links, transport, places)
        )

    def _member(self, table: Mapping[str, Any], line: int, before: list[Member]) -> Member:
        self._check_keys(table, DEVICE_KEYS, line)
        if "device" not in table:
            self._fail(line, 'a [[device]] needs device = "backend:name:index"')
        device = self._value(table, "device", str, "", line)
        cores = self._value(table, "cores", list, [], line)
        if not all(type(core) is int for core in cores):
            self._fail(self._find("cores", line), f"cores are whole numbers, not {cores}")
        member = Member(
            self._value(table, "id", str, device, line),
            device,
            tuple(cores),
            float(self._value(table, "speed", (int, float), 1.0, line)),
        )
        repeated = member.id in [other.id for other in before]
        culprit = "speed" if not 0 < member.speed <= 1 else "id" if repeated else "cores"
        self._checked(self._find(culprit, line), lambda: Cluster((*before, member)))
        return member

    def _between(self, table: Mapping[str, Any], line: int, ids: list[str]) -> frozenset[str]:
        self._check_keys(table, LINK_KEYS, line)
        pair = self._value(table, "between", list, [], line)
        if len(pair) != 2:
            self._fail(self._find("between", line), 'a [[link]] needs between = ["one", "other"]')
        for member_id in pair:
            if member_id not in ids:
                known = ", ".join(ids) or "no device"
                self._fail(
                    self._find("between", line), f"no device {member_id!r}; there is {known}"
                )
        return frozenset(pair)

    def _link(
        self, table: Mapping[str, Any], line: int, pair: frozenset[str], ids: list[str]
    ) -> Link:
        bandwidth = self._value(table, "bandwidth", str, None, line)
        latency = self._value(table, "latency", str, None, line)
        bandwidth_Bps = latency_s = None
        if bandwidth is not None:
            at = self._find("bandwidth", line)
            bandwidth_Bps = self._checked(at, lambda: parse_bandwidth(bandwidth))
        if latency is not None:
            at = self._find("latency", line)
            latency_s = self._checked(at, lambda: parse_time(latency))
        link = Link(latency_s, bandwidth_Bps)
        members = tuple(Member(member_id, member_id) for member_id in ids)
        self._checked(line, lambda: Cluster(members, {pair: link}))
        return link

    def _value(self, table: Mapping[str, Any], key: str, kind: Any, default: Any, line: int) -> Any:
        value = table.get(key, default)
        wrong = value is not default and (not isinstance(value, kind) or isinstance(value, bool))
        if wrong:
            expected = {str: "text in quotes", list: "a list"}.get(kind, "a number")
            self._fail(self._find(key, line), f"{key} = {value!r}: write {expected}")
        return value

    def _check_keys(self, table: Iterable[str], allowed: tuple[str, ...], line: int) -> None:
        for key in table:
            if key not in allowed:
                at = self._find(key, line)
                self._fail(at, f"unknown key {key!r}; allowed here: {', '.join(allowed)}")

    def _checked(self, line: int, make: Callable[[], T]) -> T:
        """What `make` returns; its `ClusterError` gets the file and the line."""
        try:
            return make()
        except ClusterError as error:
            self._fail(line, str(error))

    def _header(self, kind: str, index: int) -> int:
        """Line of the index-th [[kind]]; 1 where tables are written in another way."""
        header = re.compile(rf"\s*\[\[\s*{kind}\s*\]\]")
        numbers = [n for n, text in enumerate(self._lines, 1) if header.match(text)]
        return numbers[index] if index < len(numbers) else 1

    def _find(self, key: str, start: int) -> int:
        """First line from `start` on that sets `key` (or opens a table of it); else `start`.

        In a table, which starts with its header, the search ends at the next header.
        """
        inside = start > 1 or (bool(self._lines) and _is_header(self._lines[0]))
        setting = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*(=|\.|\])""")
        for number in range(start, len(self._lines) + 1):
            text = self._lines[number - 1]
            if inside and number > start and _is_header(text):
                break
            if setting.match(text):
                return number
        return start

    def _fail(self, line: int, why: str) -> NoReturn:
        raise ClusterError(f"{self._path}:{line}: {why}")


def _is_header(line: str) -> bool:
    return line.lstrip().startswith("[[")
