"""Bandwidths, times and links as a user writes them: `1 Gb/s`, `1 ms`."""

from __future__ import annotations

import math
import re

from hetpipe.cluster.topology import Link
from hetpipe.errors import ClusterError
from hetpipe.words import short

PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
            "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*"
MOST_S = 1e9
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of `1 Gb/s`, `250 MB/s` or `2 GiB/s` (b: bits, B: bytes).

    Raises `ClusterError` for any other text, and for an impossible bandwidth.
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
    """Return the seconds of `1 ms`. Raises `ClusterError`."""
    match = re.fullmatch(rf"{NUMBER}([a-z]+)", text.strip())
    if match is None or match[2] not in PER_SECOND:
        raise ClusterError(
            f'latency {short(text)}: write a number and one of {", ".join(PER_SECOND)}: "1 ms"'
        )
    time_s = float(match[1]) / PER_SECOND[match[2]]
    if time_s > MOST_S:
        raise ClusterError(f"latency is {time_s} s, must be at most {MOST_S:g}")
    return time_s


def parse_link(text: str) -> Link:
    """Return the link of `1 Gb/s, 1 ms` (bandwidth, latency). Raises `ClusterError`."""
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise ClusterError(f'link {text!r}: write bandwidth and latency, as "1 Gb/s, 1 ms"')
    return Link(parse_time(latency), parse_bandwidth(bandwidth))
