"""The device under test, with the basic operations that all checks use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.check.difference import Array, difference
from hetpipe.check.reference import tensors_of
from hetpipe.conformance.check import BrokenRule, NotAsked, expect
from hetpipe.sdk.backend import Buffer, Device, Event, Executable
from hetpipe.sdk.graph import canonical, dtype_name, graph_calls, operator_name
from hetpipe.sdk.host.registry import decompositions_of

Function = Callable[..., Any]

WAIT_S = 60.0
"""The longest wait for one event."""


class Rig:
    """The device under test; all work runs on it, without fallback to another device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.info = device.info
        self.table = dict(decompositions_of(device.info.backend))

    @property
    def is_interpreter(self) -> bool:
        """Whether the device interprets kernels, so that large cases take minutes."""
        return self.info.capabilities.reference and self.info.capabilities.emulated

    def graph(self, fn: Function, *inputs: torch.Tensor) -> fx.GraphModule:
        """Return the canonical graph of a function, with the backend's decompositions.

        Raises `NotAsked` if the device refuses an operator or a dtype.
        """
        graph = trace(fn, inputs, self.table)
        self.require(graph)
        return graph

    def require(self, graph: fx.GraphModule) -> None:
        """Raise `NotAsked` if the device refuses a node or a dtype of the graph."""
        refused = refusals(self.device, graph)
        if refused:
            raise NotAsked("refused: " + "; ".join(dict.fromkeys(refused)))
        dtypes = {*self.info.dtypes, *self.info.cast_dtypes}
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (name := dtype_name(value.dtype)) not in dtypes:
                raise NotAsked(f"{name} is not among its dtypes")

    def compile(self, fn: Function, *inputs: torch.Tensor) -> Executable:
        """Compile a function; see `graph`."""
        return self.device.compile(self.graph(fn, *inputs))

    def put(self, value: Array | torch.Tensor) -> Buffer:
        """Return a buffer with a copy of a host array."""
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        buffer, event = self.device.upload(array)
        event.wait(WAIT_S)
        return buffer

    def get(self, buffer: Buffer) -> Array:
        """Return a buffer's values in a host array."""
        # The array is full of 77, so that a missing copy shows.
        array = np.full(buffer.shape, 77, host_dtype(buffer.dtype))
        self.device.download(buffer, array).wait(WAIT_S)
        return array

    def run(
        self,
        executable: Executable,
        inputs: Sequence[Buffer],
        donate: Sequence[int] = (),
        queue: int = 0,
    ) -> list[Buffer]:
        outputs, event, _ = executable.run(inputs, frozenset(donate), (), queue)
        event.wait(WAIT_S)
        return outputs

    def results(self, executable: Executable, *inputs: torch.Tensor) -> list[Array]:
        outputs = self.run(executable, [self.put(tensor) for tensor in inputs])
        return [self.get(buffer) for buffer in outputs]

    def begin(
        self, executable: Executable, inputs: Sequence[Buffer], after: Sequence[Event] = ()
    ) -> tuple[list[Buffer], Event]:
        """Start a run and return its outputs and its event, without a wait."""
        outputs, event, _ = executable.run(inputs, frozenset(), after)
        return outputs, event

    def heavy(self, rows: int = 192, depth: int = 12) -> tuple[Executable, Array, Array]:
        """Return a chain of products that takes milliseconds, an input, and the chain's result.

        Each product is divided by 2 * `rows`, so values stay below one. An interpreter gets a short
        chain of small products.
        """
        if self.is_interpreter:
            rows, depth = 16, 3

        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = torch.mm(x, x) * (0.5 / rows) + 0.4
            return x

        x = torch.rand(rows, rows, generator=torch.Generator().manual_seed(3))
        executable = self.compile(chain, x)
        return executable, x.numpy(), chain(x.double()).numpy()


def finish(event: Event, what: str) -> None:
    """Poll until the event has happened, because wait() could hide a wrong answer of done()."""
    end_s = time.monotonic() + WAIT_S
    while not event.done():
        expect(time.monotonic() < end_s, f"{what} has not ended after {WAIT_S:.0f} s")
        time.sleep(0)
    event.wait(WAIT_S)


def expect_form(buffer: Buffer, dtype: str, shape: tuple[int, ...], what: str) -> None:
    """Raise `BrokenRule` unless a buffer has this dtype and shape."""
    expect(buffer.shape == shape, f"the buffer of {what} has the shape {buffer.shape}")
    expect(buffer.dtype == dtype, f"the buffer of {what} has the dtype {buffer.dtype}")


def host_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype for a buffer's dtype; a bfloat16 value is a 16-bit integer."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def trace(fn: Function, inputs: Sequence[torch.Tensor], table: Any) -> fx.GraphModule:
    """Return the canonical graph of a function that returns tensors.

    Raises `NotAsked` if the graph reads constants, which training graphs never do.
    """

    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(fn(*args)))

    own = [tensor.clone() for tensor in inputs]  # a repeated tensor would become one input
    # Remove changes in place, because captured graphs have none.
    functional = functionalize(make_fx(flat)(*own), remove="mutations")
    try:
        graph = make_fx(functional, decomposition_table=dict(table))(*own)
    except RuntimeError:  # functionalisation can yield strides that an operator rejects
        graph = make_fx(flat, decomposition_table=dict(table))(*own)
    if any(node.op == "get_attr" for node in graph.graph.nodes):
        raise NotAsked("the traced graph reads a constant")
    _drop_unread_writes(graph.graph)
    graph.graph.eliminate_dead_code()
    return canonical(graph)


def _drop_unread_writes(graph: fx.Graph) -> None:
    """Drop a decomposition's in-place writes to tensors that no node reads afterwards."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            written = node.args[0]
            if (
                written.op != "placeholder"
                and max(map(place.__getitem__, written.users)) == place[node]
            ):
                graph.erase_node(node)


def refusals(device: Device, graph: fx.GraphModule) -> list[str]:
    """Return the operators that the device refuses, each with the reason.

    Raises `BrokenRule` if `supports` returns neither None nor a reason.
    """
    answers = []
    for node in graph_calls(graph):
        reason = device.supports(node)
        if not (reason is None or (isinstance(reason, str) and reason)):
            raise BrokenRule(f"supports({operator_name(node)}) is {reason!r}, not a reason or None")
        if reason is not None:
            answers.append(f"{operator_name(node)} ({reason})")
    return answers


def forms_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtypes and shapes of tensors, for a message."""
    return ", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)


def compare(actual: Array, expected: Array, limit: float | Array, where: str) -> None:
    """Raise `BrokenRule` with the worst element if an element differs by more than `limit`.

    Infinities, NaN, integers and bools must be equal.
    """
    found = difference(actual, expected, limit)
    if found.is_wrong:
        raise BrokenRule(f"{where}: {found.text}")
