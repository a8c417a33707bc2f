"""Runs the controller's graphs on a worker's device, separately from the worker's stages.

The controller calls these functions by `Workers.call`. They neither read nor write values of a
stage. An exception of the device is a result, so a trial never ends a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hetpipe.errors import HetpipeError, UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.graph import graph_outputs, load_graph
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.wire.wire import Array

WAIT_S = 300.0
"""Seconds after which an unfinished run counts as failed."""


@dataclass(frozen=True)
class Held:
    """An input on the device: the result of an earlier trial, stored under a name."""

    name: str


class DeviceFailedError(HetpipeError):
    """The device raised an error in a trial; `refused` says whether it lacks an operator."""

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


_kept: WeakKeyDictionary[Device, dict[str, Any]] = WeakKeyDictionary()
"""By device and name: an executable with the number of its results, or a value."""


def _return_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def catching(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            is_ours = isinstance(error, HetpipeError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": ")
            return DeviceFailedError(text, isinstance(error, UnsupportedOperatorError))

    return catching


@_return_errors
def compile_graph(device: Device, name: str, graph: bytes) -> None:
    """Compile a dumped graph, and keep it under a name. Return None or the error."""
    loaded = load_graph(graph)
    (executable,) = device.compile_all([loaded])
    _kept.setdefault(device, {})[name] = executable, len(graph_outputs(loaded))


@_return_errors
def run_graph(
    device: Device,
    name: str,
    inputs: Sequence[Array | Held],
    donate: frozenset[int],
    kept: Mapping[int, str],
    unread: frozenset[int] = frozenset(),
) -> list[Array | None]:
    """Run a graph. Return the error, or the outputs on the host, with None for outputs in `unread`.

    Outputs in `kept` stay on the device as well, under these names. bfloat16 is returned as int16.
    """
    there = _kept[device]
    buffers: list[Buffer] = []
    for value in inputs:
        if isinstance(value, Held):
            buffers.append(there[value.name])
        else:
            buffer, event = upload(device, np.asarray(value, order="C"))
            event.wait(WAIT_S)
            buffers.append(buffer)
    executable, results = there[name]
    outputs, event, _ = check_ran(device, executable.run(buffers, donate), results)
    event.wait(WAIT_S)
    there.update({name: outputs[index] for index, name in kept.items()})
    return [
        None if index in unread else _on_host(device, buffer)
        for index, buffer in enumerate(outputs)
    ]


def forget(device: Device, prefix: str = "") -> None:
    """Drop the graphs and values whose names begin with `prefix`."""
    there = _kept.get(device, {})
    for name in [name for name in there if name.startswith(prefix)]:
        del there[name]


def _on_host(device: Device, buffer: Buffer) -> Array:
    dtype = "int16" if buffer.dtype == "bfloat16" else buffer.dtype
    array = np.empty(buffer.shape, dtype)
    device.download(buffer, array).wait(WAIT_S)
    return array
