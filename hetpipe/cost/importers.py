"""Importers: read other planners' JSON profiles as chains of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.cost.table import CostTable
from hetpipe.cost.workloads import (
    CURES,
    FORWARD_SHARE,
    Amount,
    Latency,
    OpenRecord,
    is_piper,
    piper_chain,
    placement_chain,
)
from hetpipe.errors import CostError
from hetpipe.records import Positive, Source, read_json
from hetpipe.words import choices


@dataclass(frozen=True)
class _MetisParameters(OpenRecord):
    parameters_per_layer_bytes: tuple[Amount, ...]


@dataclass(frozen=True)
class _MetisModel(OpenRecord):
    num_layers: Positive
    parameters: _MetisParameters


@dataclass(frozen=True)
class _MetisTimes(OpenRecord):
    layer_compute_total_ms: tuple[Amount, ...]  # forward and backward together


@dataclass(frozen=True)
class _MetisProfile(OpenRecord):
    """One device's profile, at the tensor-parallel degree and batch size that the file's name
    gives."""

    model: _MetisModel
    execution_time: _MetisTimes


def read_chain(
    path: Path,
    *,
    latency: Latency = "accelerator",
    unit_s: float = 1e-3,
    cut_nbytes: int | None = None,
) -> ChainCosts:
    """Read the layers of a JSON profile. The profile has one of three formats:

    - Device placement (`placement_chain`). `latency` names the device whose times count.
    - Piper (`piper_chain`).
    - Metis (Um et al., USENIX ATC 2024; README of SamsungLabs/Metis). A time is for both passes,
      and the forward gets a third of it. The file does not say how many bytes cross a cut, so
      the argument `cut_nbytes` tells. A layer also keeps `cut_nbytes` for its backward, because
      the file does not divide memory into parameters and activations.

    `unit_s` is the unit of time in files of the first two formats, in seconds. The files do not
    state the unit, which is a millisecond in device placement's files and Piper's ResNet, and a
    second in Piper's BERT.

    Raises `CostError` for a faulty file, with the place in it, and for invalid arguments.
    """
    source = Source("the profile", CostError, str(path), CURES)
    if latency not in get_args(Latency):
        raise CostError(f"no latency {latency!r}; {choices(latency, get_args(Latency))}")
    if not 0.0 < unit_s < math.inf:
        raise CostError(f"a unit of time is {unit_s} seconds; give a finite number above 0")
    data = read_json(path, CostError)
    if isinstance(data, dict) and "execution_time" in data:
        return _metis_chain(source, data, cut_nbytes)
    if not (isinstance(data, dict) and "nodes" in data):
        why = "has neither nodes nor execution_time; give one of device placement, Piper or Metis"
        raise source.fault((), why)
    if cut_nbytes is not None:
        raise source.fault((), "has the bytes of its edges; leave cut_nbytes (--cut-nbytes) out")
    if is_piper(data):
        return piper_chain(source, data, unit_s)
    return placement_chain(source, data, latency, unit_s)


def _metis_chain(source: Source, data: Any, cut_nbytes: int | None) -> ChainCosts:
    profile = source.record(_MetisProfile, data)
    count = profile.model.num_layers
    times_ms = profile.execution_time.layer_compute_total_ms
    params_nbytes = profile.model.parameters.parameters_per_layer_bytes
    for place, entries in (
        (("execution_time", "layer_compute_total_ms"), times_ms),
        (("model", "parameters", "parameters_per_layer_bytes"), params_nbytes),
    ):
        if len(entries) != count:
            why = f"has {len(entries)} entries, model.num_layers is {count}: give one per layer"
            raise source.fault(place, why)
    if cut_nbytes is None:
        why = "lacks the bytes that cross a cut; give cut_nbytes (--cut-nbytes), the product of"
        raise source.fault((), f"{why} batch, sequence, hidden size and bytes of a value")
    if cut_nbytes < 0:
        raise CostError(f"cut_nbytes is {cut_nbytes}; give 0 or more")
    return ChainCosts(
        names=tuple(f"layer{index}" for index in range(count)),
        forward_s=tuple(FORWARD_SHARE * 1e-3 * time_ms for time_ms in times_ms),
        backward_s=tuple((1 - FORWARD_SHARE) * 1e-3 * time_ms for time_ms in times_ms),
        activation_nbytes=(cut_nbytes,) * count,
        params_nbytes=tuple(map(math.ceil, params_nbytes)),
        cut_nbytes=(*(cut_nbytes,) * (count - 1), 0),
    )


def read_costs(path: Path) -> CostTable:
    """Read a cost table from a JSON file. Raises `CostError` with the file and the place in it."""
    return CostTable.from_json(read_json(path, CostError), str(path))
