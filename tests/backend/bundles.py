"""Bundles of one small graph, and a counter of the programs that a runtime compiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from found_devices import Array, run
from hetpipe.backends.opencl.platform.driver import driver
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.backend import Device
from hetpipe.sdk.formats.bundle import (
    MANIFEST,
    Manifest,
    SourceEntry,
    add_binary,
    sha256_of,
    write_bundle,
)
from hetpipe.sdk.graph import canonical

AGAIN = "hetpipe kernels export plan.json"
VALUES = np.linspace(-2, 2, 35, dtype=np.float32).reshape(5, 7)


def graph_of(factor: float) -> fx.GraphModule:
    """Return a graph with one kernel, whose source contains the factor."""
    return canonical(make_fx(lambda x: (torch.tanh(x) * factor,))(torch.zeros(5, 7)))


def write(folder: Path, device: Device, graph: fx.GraphModule) -> Manifest:
    """Write a bundle of one program, without a binary."""
    exported = device.export({"forward of 5 samples": graph})
    sources = tuple(
        SourceEntry(s.file, sha256_of(s.text.encode()), s.options, s.kernels, (), None)
        for s in exported.sources
    )
    facts = dict(device.binary_facts())
    manifest = Manifest(
        "tanh", 0, 0, device.info.id, facts, "", "none is known", AGAIN, exported.programs, sources
    )
    return write_bundle(folder, manifest, {s.file: s.text for s in exported.sources})


def build(folder: Path, device: Device, manifest: Manifest) -> Manifest:
    """Compile the bundle's source and add the binary."""
    (source,) = manifest.sources
    text = (folder / source.file).read_text()
    content = device.build(source, text, manifest.programs)
    return add_binary(folder, manifest, source, content, device.binary_facts())


def result(device: Device, graph: fx.GraphModule) -> Array:
    """Return the graph's output for `VALUES`."""
    (output,) = run(device, graph, [VALUES])
    return output


def change_manifest(folder: Path, change: Any) -> None:
    """Change the data of a manifest and update its checksum."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    data.pop("checksum")
    change(data)
    checksum = sha256_of(json.dumps(data, sort_keys=True).encode())
    path.write_text(json.dumps(data | {"checksum": checksum}))


def count_sources(monkeypatch: Any) -> list[str]:
    """Return a list that collects the texts of all OpenCL programs made from source from now on."""
    cl = driver()
    texts: list[str] = []
    usual = cl.Program.__init__

    def counting(self: Any, *args: Any) -> None:
        texts.extend(arg for arg in args if isinstance(arg, str))
        usual(self, *args)

    monkeypatch.setattr(cl.Program, "__init__", counting)
    return texts
