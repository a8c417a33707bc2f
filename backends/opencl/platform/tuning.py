"""Sizes of tiles and blocks in the kernels for processors: from rules, or a device's tuning."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from hetpipe.entries import Entries, key_of
from hetpipe.errors import BackendError
from hetpipe.records import Count, Positive, Source
from hetpipe.records import Entries as Listed
from hetpipe.toml import parse_toml

from .runtimes import Runtime, cpu_flags, target_arch

ENTRIES = Entries("opencl/tuning", "json", most=100)
VARIABLE = "HETPIPE_OPENCL_TUNING"
"""Environment variable with a `Tuning` as JSON; it overrides stored tunings and rules."""
SHIPPED = "cpu/tuning.toml"
USUAL_CACHE_NBYTES = {2: 1 << 19, 3: 1 << 25}
"""Sizes of caches, by level, for systems that do not report them."""


@dataclass(frozen=True)
class Tuning:
    """Choices that change results only by rounding."""

    narrow: bool = False
    """Whether tiles are computed in parts that fit 16 vector registers."""
    depth_block: Positive = 1024
    """The most steps of k in a launch."""

    def __str__(self) -> str:
        tile = "4 parts of 6 x 16" if self.narrow else "12 x 32"
        return f"tile {tile}, depth {self.depth_block}"


@dataclass(frozen=True)
class _Tile:
    lanes: Positive
    narrow: bool


@dataclass(frozen=True)
class _Block:
    cache_nbytes: Count
    depth: Positive


@dataclass(frozen=True)
class _Rules:
    tile: Annotated[tuple[_Tile, ...], Listed(1)]
    block: Annotated[tuple[_Block, ...], Listed(1)]


def tuning_of(cl_device: Any, runtime: Runtime | None) -> Tuning:
    """Return a device's tuning: from the variable, else from the store, else from the rules.

    Raises `BackendError` if the variable or the stored text is not a valid tuning.
    """
    if text := os.environ.get(VARIABLE, "").strip():
        return _parsed(text, f"the variable {VARIABLE}")
    kept = ENTRIES.load(_key(cl_device))
    if kept is not None:
        return _parsed(kept.decode(), "the tuning that was kept")
    return by_rules(lanes_of(cl_device, runtime), cache_nbytes(2))


def by_rules(lanes: int, nbytes: int) -> Tuning:
    """Return the shipped choice for `lanes` floats per vector and `nbytes` of L2 cache per core."""
    rules = _rules()
    narrow = next(tile.narrow for tile in rules.tile if lanes >= tile.lanes)
    depth = next(block.depth for block in rules.block if nbytes >= block.cache_nbytes)
    return Tuning(narrow, depth)


def candidates() -> list[Tuning]:
    """Return all tunings with a tile and a depth of the rules, or twice the largest depth."""
    rules = _rules()
    depths = {block.depth for block in rules.block} | {2 * max(b.depth for b in rules.block)}
    return [Tuning(tile.narrow, depth) for tile in rules.tile for depth in sorted(depths)]


def keep(cl_device: Any, tuning: Tuning) -> None:
    """Store a tuning for a device; `tuning_of` returns it from now on."""
    ENTRIES.store(_key(cl_device), text_of(tuning).encode())


def text_of(tuning: Tuning) -> str:
    return json.dumps(asdict(tuning))


def lanes_of(cl_device: Any, runtime: Runtime | None) -> int:
    """Return the floats per vector register in the code that a runtime compiles.

    Intel's runtimes compile for the processor of `target_arch`, whatever the device reports.
    """
    arch = target_arch() if runtime is not None and runtime.named_arch else ""
    if arch:
        return 8 if "avx2" in arch else 16
    return int(cl_device.native_vector_width_float) or 1


def cache_nbytes(level: int) -> int:
    """Return the bytes of a core's L2 cache, or of the shared L3 cache, from the system."""
    root = Path("/sys/devices/system/cpu/cpu0/cache")
    try:
        for index in sorted(root.glob("index*")):
            if (index / "level").read_text().strip() == str(level):
                text = (index / "size").read_text().strip()
                return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    except (OSError, ValueError):
        pass
    return USUAL_CACHE_NBYTES[level]


@cache
def _rules() -> _Rules:
    file = files("hetpipe.kernels").joinpath(SHIPPED)
    data = parse_toml(file.read_text(encoding="utf-8"), Path(SHIPPED), BackendError)
    return Source(SHIPPED, BackendError).record(_Rules, data)


def _parsed(text: str, title: str) -> Tuning:
    try:
        data: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise BackendError(f"{title} is no JSON: {error}; write {text_of(Tuning())}") from error
    return Source(title, BackendError).record(Tuning, data)


def _key(cl_device: Any) -> str:
    platform = cl_device.platform
    return key_of(
        platform.name, cl_device.name, cl_device.driver_version, target_arch(), sorted(cpu_flags())
    )
