"""Loads the programs of one device from bundles, and compiles nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetpipe.errors import BundleError
from hetpipe.sdk.formats.bundle import (
    BUILD,
    Binary,
    KernelEntry,
    Manifest,
    SourceEntry,
    read_binary,
    read_bundles,
)

from ..lower.launch import Kernel, Launch
from ..platform.driver import driver, errors, quiet
from ..platform.runtimes import BUNDLES
from .export import kernel_hash


class BundledPrograms:
    """The programs of a device that has bundles, with the methods of `Programs`.

    All kernels that are prepared together come from one bundle: a board holds one binary at a time.
    """

    def __init__(
        self, context: Any, cl_device: Any, device_id: str, facts: Mapping[str, str], folder: Path
    ) -> None:
        self._context = context
        self._cl_device = cl_device
        self._device_id = device_id
        self._facts = facts
        self._folder = folder
        self._bundles: list[_Bundle] | None = None
        self._found: dict[Kernel, tuple[Any, str]] = {}
        self._lock = threading.Lock()

    def prepare(self, kernels: Iterable[Kernel], launches: Sequence[Launch] = ()) -> None:
        """Load the binaries that have these kernels.

        Raises `BundleError` if the device has no bundle, if no bundle has the current text of all
        these kernels, or if a binary was compiled for another driver or processor.
        """
        needed = list(dict.fromkeys(kernels))
        if not needed:
            return
        with self._lock:
            if self._bundles is None:
                self._bundles = self._read()
            missing = {bundle: bundle.missing(needed) for bundle in self._bundles}
            chosen = min(missing, key=lambda bundle: len(missing[bundle]))
            if missing[chosen]:
                raise chosen.stale(missing[chosen], self._device_id)
            for kernel in needed:
                source, entry = chosen.entries[_key(kernel)]
                if source.file not in chosen.programs:
                    chosen.programs[source.file] = self._load(chosen, source)
                self._found[kernel] = (chosen.programs[source.file], entry.name)

    def kernel(self, kernel: Kernel) -> Any:
        """Return a new `cl.Kernel`, whose arguments are not set."""
        program, name = self._found[kernel]
        with quiet(), errors(self._device_id, f"looking up kernel {name} of a bundle"):
            return driver().Kernel(program, name)

    def _read(self) -> list[_Bundle]:
        every = read_bundles(self._folder)
        own = [_Bundle(place, m) for place, m in every.items() if m.device == self._device_id]
        if not own:
            there = ", ".join(f"{place.name} for {m.device}" for place, m in every.items())
            raise BundleError(
                f"{self._device_id} should load a bundle from {self._folder}, "
                f"but the folder has no bundle for it: there is {there or 'none at all'}; "
                "write one with `hetpipe kernels export`, or "
                f"remove the folder from the cluster file and from {BUNDLES}"
            )
        return own

    def _load(self, bundle: _Bundle, source: SourceEntry) -> Any:
        binary, content = read_binary(bundle.place, bundle.manifest, source)
        self._check(bundle.place, binary)
        cl = driver()
        with quiet(), errors(self._device_id, f"loading {bundle.place / binary.file}"):
            return cl.Program(self._context, [self._cl_device], [content]).build()

    def _check(self, place: Path, binary: Binary) -> None:
        """Raise `BundleError` for a binary that was compiled for another driver or processor."""
        here, there = self._facts, binary.facts
        if other := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
            raise BundleError(
                f"{place / binary.file} was compiled for {_said(there, other)}, and "
                f"{self._device_id} has {_said(here, other)}; compile it again: {BUILD} {place} "
                f"--device {self._device_id}"
            )


def _said(facts: Mapping[str, str], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {facts.get(key) or 'unknown'}" for key in keys)


class _Bundle:
    """A bundle: its kernels by hash and function, and its loaded programs."""

    def __init__(self, place: Path, manifest: Manifest) -> None:
        self.place, self.manifest = place, manifest
        self.entries: dict[tuple[str, str], tuple[SourceEntry, KernelEntry]] = {
            (entry.sha256, entry.function): (source, entry)
            for source in manifest.sources
            for entry in source.kernels
        }
        self.programs: dict[str, Any] = {}

    def missing(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Return the kernels whose current text the bundle lacks."""
        return [kernel for kernel in kernels if _key(kernel) not in self.entries]

    def stale(self, missing: Sequence[Kernel], device_id: str) -> BundleError:
        """Return the error for kernels that the bundle lacks; the text names the first kernel."""
        first = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        others = [sha256 for sha256, function in self.entries if function == first.name]
        has = f"it with the hash {others[0]}" if others else "no kernel of that name"
        return BundleError(
            f"{self.place} is stale for {device_id}: the graphs need kernel "
            f"{first.name} with the hash {kernel_hash(first)}{more}, but the bundle "
            f"has {has} (the hash of all its kernels is {self.manifest.sha256}); write"
            f" it again: {self.manifest.command}; or, for another model, plan or size, "
            "or for a profile, remove the bundles from the cluster file"
        )


def _key(kernel: Kernel) -> tuple[str, str]:
    return kernel_hash(kernel), kernel.name
