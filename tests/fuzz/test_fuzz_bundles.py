"""Manifests of bundles: errors name file and place, and manifests are written as they were read.

A manifest contains its checksum. Most files here have a right one, so that their content is read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from damage import changed, spoilt
from documents import IN_JSON, document
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import values

from hetpipe.errors import BundleError
from hetpipe.sdk.formats.bundle import (
    MANIFEST,
    VERSION,
    Manifest,
    checksum_of,
    file_of,
    hash_of,
    read_binary,
    read_bundles,
    read_source,
    write_bundle,
)

OWN = {key: value for key, value in document("bundle.json").items() if key != "checksum"}
TEXTS = {
    file_of: st.sampled_from(["stage.cl", "a-1.bin", "x" * 100]),
    hash_of: st.sampled_from(["0" * 64, "0123456789abcdef" * 4]),
}


def attempt(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(content)
    read = result_of(lambda: read_bundles(folder), (BundleError,))
    if isinstance(read, str):
        assert re.search(IN_JSON, read.removeprefix(str(folder / MANIFEST))), read
        return REFUSED
    ((place, manifest),) = read.items()
    for source in manifest.sources:
        result_of(lambda source=source: read_source(place, manifest, source), (BundleError,))
        result_of(lambda source=source: read_binary(place, manifest, source), (BundleError,))
    written = write_bundle(folder.with_name("again"), manifest, {})
    assert read_bundles(folder.with_name("again")).popitem()[1] == written
    return ACCEPTED


def with_checksum(data: Any) -> bytes:
    """Return the manifest with its right checksum."""
    if isinstance(data, dict):
        data = data | {"checksum": checksum_of(data)}
    return json.dumps(data).replace(json.dumps("@huge@"), "9" * 5000).encode()


def test_damaged(tmp_path: Path) -> None:
    whole = st.just(OWN)
    files = (
        changed(whole).map(with_checksum)
        | changed(whole).map(with_checksum)
        | spoilt(whole.map(with_checksum))
    )
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "b", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    whole = values(Manifest, TEXTS, strict=True).map(lambda data: data | {"version": VERSION})
    loose = values(Manifest, TEXTS).map(with_version)
    files = (whole | whole | changed(whole) | loose).map(with_checksum)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "b", content)))


def with_version(data: Any) -> Any:
    return data | {"version": VERSION} if isinstance(data, dict) else data
