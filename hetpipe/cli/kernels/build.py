"""`hetpipe kernels build BUNDLE`: compiles the sources of a bundle, and adds the binaries to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.errors import BundleError
from hetpipe.records import read_file

if TYPE_CHECKING:
    from hetpipe.sdk.formats.bundle import Manifest

MOST_BINARY_NBYTES = 4 << 30


def command(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="The folder of a bundle, or of several bundles."),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="ID", help="The device. \\[default: the bundle's device]"),
    ] = None,
    binary: Annotated[
        Path | None,
        typer.Option(
            "--binary", metavar="FILE", help="The binary that the vendor's compiler has made."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compile a bundle with a device's own driver, or put the vendor's binary into it."""
    from hetpipe.sdk.formats.bundle import read_bundles

    output = Output(json)
    bundles = read_bundles(bundle)
    if not bundles:
        raise BundleError(
            f"{bundle} has no bundle (no manifest.json); write one with `hetpipe kernels export`"
        )
    if binary is not None and len(bundles) > 1:
        names = ", ".join(place.name for place in bundles)
        raise BundleError(
            f"--binary {binary} belongs to one bundle; name one of {names} in {bundle}"
        )
    results = []
    for place in bundles:
        manifest = build_bundle(place, device, binary)
        for source in manifest.sources:
            assert source.binary is not None
            hashed = source.binary.sha256
            output.text(f"{place / source.binary.file}, hash {hashed[:12]}, for {manifest.device}")
            results.append(
                {"file": str(place / source.binary.file), "sha256": hashed,
                 "device": manifest.device, "facts": source.binary.facts}
            )  # fmt: skip
    output.finish({"binaries": results})


def build_bundle(place: Path, device: str | None = None, binary: Path | None = None) -> Manifest:
    """Add binaries to a bundle: compiled ones, or the file `binary`. Return the new manifest.

    Raises `HetpipeError`.
    """
    from dataclasses import replace

    from hetpipe.sdk.formats.bundle import add_binary, read_manifest, read_source
    from hetpipe.sdk.host.registry import open_device

    manifest = read_manifest(place)
    if binary is not None and len(manifest.sources) > 1:
        raise BundleError(
            f"{place} has {len(manifest.sources)} sources, and --binary replaces only one: leave "
            "out --binary"
        )
    opened = open_device(device or manifest.device)
    try:
        manifest = replace(manifest, device=opened.info.id)
        for source in manifest.sources:
            text = read_source(place, manifest, source)
            if binary is None:
                content = opened.build(source, text, manifest.programs)
            else:
                content = read_file(binary, BundleError, MOST_BINARY_NBYTES)
            manifest = add_binary(place, manifest, source, content, opened.binary_facts())
    finally:
        opened.close()
    return manifest
