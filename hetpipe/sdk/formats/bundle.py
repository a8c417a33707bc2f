"""Bundles: the kernels of a stage as sources, and the binaries that a compiler made from them.

    bundles/stage-0/manifest.json   the bundle's content, with hashes: a `Manifest`
    bundles/stage-0/stage.cl        sources for an offline compiler
    bundles/stage-0/stage.bin       the compiled binary

A backend writes sources (`Device.export`) and compiles them (`Device.build`). When it loads a
bundle, it compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from hetpipe.errors import BundleError
from hetpipe.files import write_beside, write_json
from hetpipe.records import (
    Count,
    Entries,
    Name,
    Number,
    OneOf,
    Parsed,
    Positive,
    Source,
    Whole,
    read_file,
    read_json,
)
from hetpipe.sdk.info import DTYPE_NBYTES
from hetpipe.words import short, word

VERSION = 1
MANIFEST = "manifest.json"
DIRECTIONS = ("in", "out", "inout", "value")
BUILD = "hetpipe kernels build"
"""The command that puts binaries into a bundle."""

MOST_NBYTES = 4 << 30
"""Bytes of the largest source or binary; a large FPGA's binary has some hundred MB."""
LARGEST = 3.5e38
"""A bound above every float32."""


def hash_of(text: str) -> str:
    """Return `text` if it is a SHA-256 in hexadecimal digits, else raise `BundleError`."""
    if re.fullmatch("[0-9a-f]{64}", text) is None:
        raise BundleError(f"{short(text)} is no SHA-256; write 64 digits of 0-9 and a-f")
    return text


def file_of(text: str) -> str:
    """Return `text` if it can name a file in a bundle's folder, else raise `BundleError`."""
    if re.fullmatch(r"\w[\w.-]{0,99}", text, re.ASCII) is None:
        raise BundleError(
            f"{short(text)} is no name of a file in the bundle's own folder; write up to 100 "
            "letters, digits, _, . and -"
        )
    return text


Hash = Annotated[str, Parsed(hash_of)]
FileName = Annotated[str, Parsed(file_of)]
Range = Annotated[tuple[Positive, ...], Entries(1, 3)]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. `out` is only written; `inout` may be read and written."""

    name: Name
    type: Name  # type of the number; for a tensor the type of its elements and " *"
    direction: Annotated[str, OneOf(DIRECTIONS)]


@dataclass(frozen=True)
class KernelEntry:
    """A kernel in a source. `name` is the kernel's name in this source."""

    name: Name
    function: Name  # the kernel's name before it was renamed to be unique in the source
    sha256: Hash  # of the kernel's original text and options
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Argument:
    """A row-major tensor, or a number. A number that JSON lacks (infinity) is null."""

    dtype: Annotated[str, OneOf(tuple(DTYPE_NBYTES))]
    shape: tuple[Count, ...] | None  # None: a number
    value: (
        Annotated[int, Whole(-(2**31), 2**31 - 1)]
        | Annotated[float, Number(-LARGEST, LARGEST)]
        | None
    )


@dataclass(frozen=True)
class LaunchEntry:
    """One run of a kernel over a range. Without a local size, the runtime chooses one."""

    kernel: Name
    global_size: Range
    local_size: Range | None
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class ProgramEntry:
    """A program of the stage, such as `forward of 32 samples`, as a list of launches."""

    name: Name
    launches: tuple[LaunchEntry, ...]


@dataclass(frozen=True)
class Binary:
    """A compiled source. `facts` describe the device, such as the driver and its version."""

    file: FileName
    sha256: Hash
    source_sha256: Hash  # of the source when it was compiled
    facts: dict[str, str]


@dataclass(frozen=True)
class SourceEntry:
    """A source and its kernels. `commands` run the vendor's compiler, if it is known."""

    file: FileName
    sha256: Hash
    options: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]
    commands: tuple[str, ...]
    binary: Binary | None

    @property
    def stem(self) -> str:
        return Path(self.file).stem


@dataclass(frozen=True)
class Manifest:
    """The content of a bundle. `facts` describe the device for which it was written."""

    model: str
    stage: Count
    replica: Count
    device: Name
    facts: dict[str, str]
    board: str  # the board's id; empty if no board was named
    compiler: str  # the board's compiler, or why there is none
    command: str  # the command that makes this bundle again
    programs: tuple[ProgramEntry, ...]
    sources: Annotated[tuple[SourceEntry, ...], Entries(1)]

    @property
    def sha256(self) -> str:
        """A hash of all kernels, which distinguishes two bundles."""
        kernels = sorted(kernel.sha256 for source in self.sources for kernel in source.kernels)
        return sha256_of("".join(kernels).encode())


@dataclass(frozen=True)
class ExportedSource:
    """A source that a device exports."""

    file: str
    text: str
    options: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]


@dataclass(frozen=True)
class Exported:
    """The result of `Device.export`."""

    sources: tuple[ExportedSource, ...]
    programs: tuple[ProgramEntry, ...]


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write_bundle(folder: Path, manifest: Manifest, texts: Mapping[str, str]) -> Manifest:
    """Write `texts` (sources by file) and the manifest. Return the manifest with its binaries.

    A binary of an earlier bundle in this folder stays if its source is the same, because a vendor's
    compiler may have taken hours. Raises `HetpipeError`.
    """
    earlier: dict[str, Binary] = {}
    if (folder / MANIFEST).exists():
        sources = read_manifest(folder).sources
        earlier = {s.sha256: s.binary for s in sources if s.binary is not None}
    kept = tuple(replace(s, binary=earlier.get(s.sha256)) for s in manifest.sources)
    for file, text in texts.items():
        write_beside(folder / file, text.encode())
    return _write_manifest(folder, replace(manifest, sources=kept))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a bundle. Raises `BundleError` with the file and the place in it."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder; give the folder of a bundle, with a {MANIFEST}")
    source = Source("the manifest", BundleError, str(path))
    data = read_json(path, BundleError)
    there = data.pop("checksum", None) if isinstance(data, dict) else None
    manifest = source.versioned(Manifest, data, VERSION)
    if there != (now := checksum_of(data)):
        why = f"has the checksum {short(there)}, but its content has {now}: it was changed by hand"
        raise source.fault((), f"{why}; write it again: {word(manifest.command)}")
    return manifest


def read_bundles(folder: Path) -> dict[Path, Manifest]:
    """Return manifests by folder: of `folder` if it is a bundle, else of all bundles in it.

    Raises `BundleError`.
    """
    if not folder.is_dir():
        return {}
    folders = [folder] if (folder / MANIFEST).exists() else sorted(folder.glob(f"*/{MANIFEST}"))
    places = [path if path.is_dir() else path.parent for path in folders]
    return {place: read_manifest(place) for place in places}


def read_source(folder: Path, manifest: Manifest, source: SourceEntry) -> str:
    """Return the text of a source. Raises `BundleError` if it has changed since the export."""
    content = read_file(folder / source.file, BundleError, MOST_NBYTES)
    if (now := sha256_of(content)) != source.sha256:
        raise BundleError(
            f"{folder / source.file} has changed: its hash is {now}, but the manifest has "
            f"{source.sha256}; write it again: {manifest.command}"
        )
    return content.decode()


def read_binary(folder: Path, manifest: Manifest, source: SourceEntry) -> tuple[Binary, bytes]:
    """Return the record and the content of a source's binary.

    Raises `BundleError` if there is no binary, or if the binary or its source has changed.
    """
    binary, build = source.binary, f"{BUILD} {folder} --device {manifest.device}"
    if binary is None:
        raise BundleError(f"{folder} has no binary of {source.file}; compile it: {build}")
    if binary.source_sha256 != source.sha256:
        raise BundleError(
            f"{folder / binary.file} is stale: it was compiled from a source with the "
            f"hash {binary.source_sha256}, but {source.file} has the hash "
            f"{source.sha256}; compile it again: {build}"
        )
    content = read_file(folder / binary.file, BundleError, MOST_NBYTES)
    if (now := sha256_of(content)) != binary.sha256:
        raise BundleError(
            f"{folder / binary.file} is not the binary that was put there: its hash is {now}, but "
            f"the manifest has {binary.sha256}; compile it again: {build}"
        )
    return binary, content


def add_binary(
    folder: Path, manifest: Manifest, source: SourceEntry, content: bytes, facts: Mapping[str, str]
) -> Manifest:
    """Put the binary of a source into a bundle; return the new manifest. Raises `HetpipeError`."""
    file = f"{source.stem}.bin"
    write_beside(folder / file, content)
    binary = Binary(file, sha256_of(content), source.sha256, dict(facts))
    sources = tuple(replace(s, binary=binary) if s == source else s for s in manifest.sources)
    return _write_manifest(folder, replace(manifest, sources=sources))


def _write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    data: dict[str, Any] = {"version": VERSION, **asdict(manifest)}
    write_json(folder / MANIFEST, data | {"checksum": checksum_of(data)})
    return manifest


def checksum_of(data: Any) -> str:
    """Return a checksum that reveals an edited manifest: edited launches could use wrong memory."""
    return sha256_of(json.dumps(data, sort_keys=True).encode())
