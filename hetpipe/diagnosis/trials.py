"""Trials on a member's device: compile graphs there, and run them on values of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hetpipe.crew.workers import Workers
from hetpipe.sdk.graph import dump_graph
from hetpipe.wire.wire import Array
from hetpipe.worker.graph_trials import DeviceFailedError, Held

Given = torch.Tensor | Held
"""An input: a tensor, or a value on the device."""

_MODULE = "hetpipe.worker.graph_trials"


class Trials:
    """Trials on one member; the names of all graphs and values begin with `prefix`."""

    def __init__(self, crew: Workers, member: str, prefix: str) -> None:
        self._crew, self._member, self._prefix = crew, member, prefix
        self._count = 0

    def compile(self, graph: fx.GraphModule) -> str:
        """Compile a graph and return its name. Raises `DeviceFailedError` if the device raises."""
        self._count += 1
        name = f"{self._prefix}graph {self._count}"
        self._call("compile_graph", name, dump_graph(graph))
        return name

    def run(
        self,
        name: str,
        inputs: Sequence[Given],
        donate: frozenset[int] = frozenset(),
        kept: Mapping[int, str] | None = None,
        unread: frozenset[int] = frozenset(),
    ) -> list[torch.Tensor | None]:
        """Run a graph and return its outputs; None for the indices in `unread`.

        Outputs in `kept` also stay on the device under these names, see `held`. Raises
        `DeviceFailedError` if the device raises.
        """
        given = [value if isinstance(value, Held) else array_of(value) for value in inputs]
        names = {index: self._prefix + own for index, own in (kept or {}).items()}
        outputs = self._call("run_graph", name, given, donate, names, unread)
        return [  # writable tensors
            None if a is None else torch.from_numpy(a if a.flags.writeable else a.copy())
            for a in outputs
        ]

    def held(self, name: str) -> Held:
        """Return a reference to an output that was kept on the device."""
        return Held(self._prefix + name)

    def forget(self, name: str | None = None) -> None:
        """Free one graph, or all graphs and values of these trials."""
        self._crew.call([self._member], f"{_MODULE}:forget", name or self._prefix)

    def _call(self, function: str, *args: Any) -> Any:
        (result,) = self._crew.call([self._member], f"{_MODULE}:{function}", *args)
        if isinstance(result, DeviceFailedError):
            raise result
        return result


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor as a host array; bfloat16 becomes int16."""
    tensor = tensor.contiguous()
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def declared(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a device's tensor in the declared dtype; bfloat16 arrives as int16."""
    if tensor is not None and dtype is torch.bfloat16 and tensor.dtype is torch.int16:
        return tensor.view(torch.bfloat16)
    return tensor
