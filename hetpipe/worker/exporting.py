"""Exports the kernels of a stage, in the worker of its device, lowered as for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from hetpipe.capture.program import StageGraphs
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.formats.bundle import Exported
from hetpipe.sdk.graph import load_graph, of_one_replica


def export(
    device: Device, stage: StageGraphs, more: Mapping[str, bytes]
) -> tuple[Exported, dict[str, str]]:
    """Return the kernels of all programs that a training compiles, and the facts of the device.

    `more` has further graphs, written by `dump_graph`. Raises `BackendError` if the backend has no
    export.
    """
    if not device.info.capabilities.exports:
        raise BackendError(f"backend {device.info.backend!r} does not export kernels")
    graphs = dict(_programs(stage)) | {name: load_graph(data) for name, data in more.items()}
    return device.export(graphs), dict(device.binary_facts())


def _programs(stage: StageGraphs) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the programs that `hetpipe.worker.stage` compiles, by name."""
    for samples, passes in stage.passes.items():
        of = _of(samples)
        yield f"forward {of}", of_one_replica(passes.forward.graph)
        if passes.halves is not None:
            for half, program in zip(("input", "weight"), passes.halves, strict=True):
                yield f"{half} half of the backward {of}", of_one_replica(program.graph)
        elif passes.backward is not None:
            yield f"backward {of}", of_one_replica(passes.backward.graph)
    extras = {"update": stage.update, "prediction": stage.predict, "norm": stage.norm}
    for name, extra in extras.items():
        if extra is not None:
            yield name, extra.graph
    for samples, program in stage.evaluation.items():
        yield f"evaluation {_of(samples)}", of_one_replica(program.graph)


def _of(samples: int) -> str:
    return f"of {samples} sample{'' if samples == 1 else 's'}"
