"""A companion: a second device for the operators that a device lacks, if its backend names one.

    parts of a graph     device      | companion     a value that the other side reads is copied
                         mm, relu    |               to the host's memory, and from there
                                     | gelu
                         mm          |

If the device lacks no operator of a graph, the device gets the whole graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from hetpipe.sdk.backend import DONE, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.graph import dtype_name, graph_inputs, graph_outputs, operator_name
from hetpipe.sdk.host.parts import Part, Unit, part_of, units_of
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.sdk.info import DTYPE_NBYTES
from hetpipe.sdk.inputs import check_inputs, form_of, input_forms
from hetpipe.sdk.support import refusal, require_support

if TYPE_CHECKING:
    from hetpipe.sdk.formats.bundle import Exported

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Lent:
    """An operator that a companion runs in a graph: layers, calls, bytes copied to it and back."""

    operator: str
    layers: tuple[str, ...]
    calls: int
    there_nbytes: int
    back_nbytes: int


def _ask_device(name: str) -> Any:
    """Return a method that only calls the device's method `name`."""

    def call(self: CompanionDevice, *args: Any) -> Any:
        return getattr(self.device, name)(*args)

    return call


class CompanionDevice(Device):
    """A device with its companion, which runs the operators that the device refuses."""

    def __init__(self, device: Device, companion: Device) -> None:
        self.device, self.companion = device, companion
        self.info = device.info

    def supports(self, node: fx.Node) -> str | None:
        reason = refusal(self.device, node)
        if reason is None:
            return None
        other = refusal(self.companion, node)
        if any(_dtype(each) == "bfloat16" for each in (node, *node.all_input_nodes)):
            other = "bfloat16 cannot be uploaded"
        return other and f"{reason}; its companion {self.companion.info.id}: {other}"

    def lends(self, node: fx.Node) -> str | None:
        """Return why the companion runs a node; None if the device runs it."""
        return self.device.supports(node)

    def lent(self, graph: fx.GraphModule) -> list[Lent]:
        """Return the operators of a graph that the companion runs, in the graph's order."""
        calls, layers = Counter[str](), dict[str, dict[str, None]]()
        crossed = dict[str, list[int]]()
        for part, lends in self._parts(graph):
            if not lends:
                continue
            for node in part.nodes:
                if self.lends(node) is None:
                    continue
                name = operator_name(node)
                calls[name] += 1
                layers.setdefault(name, {})[str(node.meta.get("layer", "?"))] = None
                there, back = crossed.setdefault(name, [0, 0])
                there += sum(_nbytes(each) for each in part.sources if each in node.all_input_nodes)
                back += _nbytes(node) if node in part.results else 0
                crossed[name] = [there, back]
        return [Lent(name, tuple(layers[name]), calls[name], *crossed[name]) for name in calls]

    def compile(self, graph: fx.GraphModule) -> Executable:
        return self.compile_all([graph])[0]

    def compile_all(self, graphs: Sequence[fx.GraphModule]) -> list[Executable]:
        """Compile all parts of all graphs with one call of each device."""
        for graph in graphs:
            require_support(self, graph)
        divided = [self._parts(graph) for graph in graphs]
        own = [part.graph for parts in divided for part, lends in parts if not lends]
        lent = [part.graph for parts in divided for part, lends in parts if lends]
        whole = [graph for graph, parts in zip(graphs, divided, strict=True) if not parts]
        compiled = iter(self.device.compile_all([*whole, *own]))
        wholes = [next(compiled) for _ in whole]
        others = iter(self.companion.compile_all(lent)) if lent else iter(())
        rest = iter(wholes)
        return [
            _Divided(
                self,
                graph,
                [(part, lends, next(others if lends else compiled)) for part, lends in parts],
            )
            if parts
            else next(rest)
            for graph, parts in zip(graphs, divided, strict=True)
        ]

    def compile_ahead(self, graphs: Sequence[fx.GraphModule]) -> None:
        parts = [self._parts(graph) for graph in graphs]
        own = [part.graph for each in parts for part, lends in each if not lends]
        self.device.compile_ahead([*(g for g, p in zip(graphs, parts, strict=True) if not p), *own])

    def export(self, programs: Mapping[str, fx.GraphModule]) -> Exported:
        """Export the device's kernels alone. The companion compiles lent operators as usual."""
        own: dict[str, fx.GraphModule] = {}
        for name, graph in programs.items():
            require_support(self, graph)
            parts = self._parts(graph)
            if not parts:
                own[name] = graph
            for number, (part, lends) in enumerate(parts):
                if not lends:
                    own[f"{name}, part {number}"] = part.graph
        return self.device.export(own)

    build = _ask_device("build")
    binary_facts = _ask_device("binary_facts")
    upload = _ask_device("upload")
    download = _ask_device("download")
    download_part = _ask_device("download_part")
    pin = _ask_device("pin")
    open_window = _ask_device("open_window")
    map_window = _ask_device("map_window")
    fma_ceiling = _ask_device("fma_ceiling")
    launch_floor = _ask_device("launch_floor")
    memory_used_nbytes = _ask_device("memory_used_nbytes")
    memory_available_nbytes = _ask_device("memory_available_nbytes")

    def trim(self) -> None:
        self.device.trim()
        self.companion.trim()

    def close(self) -> None:
        self.device.close()
        self.companion.close()

    def _parts(self, graph: fx.GraphModule) -> list[tuple[Part, bool]]:
        """Return each part, and whether the companion runs it; no parts if the device runs all."""
        units = units_of(graph)
        lends = [self.lends(unit[0]) is not None for unit in units]
        if not any(lends):
            return []
        grouped = _grouped(units, lends)
        parts = [(part_of(graph, group), side) for group, side in grouped]
        return [(part, side) for part, side in parts if part is not None]


def _grouped(units: Sequence[Unit], lends: Sequence[bool]) -> list[tuple[list[Unit], bool]]:
    """Return the units in topological order, grouped by device, with few changes of device."""
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    waits = [
        {unit_of[source] for source in unit[0].all_input_nodes if source in unit_of}
        for unit in units
    ]
    left = dict.fromkeys(range(len(units)))
    done: set[int] = set()
    groups: list[tuple[list[Unit], bool]] = []
    side = False
    while left:
        group: list[Unit] = []
        progress = True
        while progress:
            ready = [n for n in left if lends[n] == side and waits[n] <= done]
            progress = bool(ready)
            for number in ready:
                del left[number]
                done.add(number)
                group.append(units[number])
        if group:
            groups.append((group, side))
        side = not side
    return groups


class _Divided(Executable):
    """A graph in parts on two devices. A call returns when all parts but the last have ended."""

    def __init__(
        self,
        owner: CompanionDevice,
        graph: fx.GraphModule,
        parts: Sequence[tuple[Part, bool, Executable]],
    ) -> None:
        self._owner = owner
        self._parts = parts
        self._placeholders, self._outputs = graph_inputs(graph), graph_outputs(graph)
        self._forms = input_forms(graph)
        self._last = {node: n for n, (part, _, _) in enumerate(parts) for node in part.sources}
        self._steady: dict[fx.Node, tuple[weakref.ref[Buffer], Buffer]] = {}

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        check_inputs(self._owner.info.id, inputs, self._forms)
        own = dict(zip(self._placeholders, inputs, strict=True))
        free = {  # without a buffer that is two inputs: another part may still read it
            self._placeholders[i] for i in donate if sum(each is inputs[i] for each in inputs) == 1
        }
        lent: dict[fx.Node, Buffer] = {}
        event: Event = DONE
        for number, (part, lends, executable) in enumerate(self._parts):
            side, other = (lent, own) if lends else (own, lent)
            if lends:
                for each in (*after, event):
                    each.wait()
            for node in part.sources:
                if node not in side:
                    side[node] = self._crossed(node, other[node], lends)
            given = frozenset(
                index
                for index, node in enumerate(part.sources)
                if self._may_go(node, number, free, lends)
            )
            companion_queue = min(queue, self._owner.companion.info.capabilities.queues - 1)
            ran = executable.run(
                [side[node] for node in part.sources],
                given,
                () if lends else (*after, event),
                companion_queue if lends else queue,
            )
            runs_it = self._owner.companion if lends else self._owner.device
            results, event, _ = check_ran(runs_it, ran, len(part.results))
            if lends:
                event.wait()
            for index in given:
                side.pop(part.sources[index], None)
            side.update(zip(part.results, results, strict=True))
        for node in dict.fromkeys(self._outputs):
            if node not in own:
                own[node] = self._crossed(node, lent[node], False)
        return [own[node] for node in self._outputs], event, ()

    def _may_go(self, node: fx.Node, number: int, free: set[fx.Node], lends: bool) -> bool:
        """Return whether part `number` may overwrite a value, because nobody reads it later."""
        if self._last[node] != number or node in self._outputs or node in self._steady:
            return False
        return node.op != "placeholder" or (node in free and not lends)

    def _crossed(self, node: fx.Node, buffer: Buffer, lends: bool) -> Buffer:
        """Copy a value to the other device; a steady value is copied once for each new buffer."""
        kept = self._steady.get(node)
        if lends and kept is not None and kept[0]() is buffer:
            return kept[1]
        owner = self._owner
        source, target = (
            (owner.device, owner.companion) if lends else (owner.companion, owner.device)
        )
        shape, dtype = form_of(node)
        array = np.empty(shape, dtype)
        source.download(buffer, array).wait()
        copy, event = upload(target, array)
        event.wait()
        if lends and node.meta.get("steady"):
            self._steady[node] = (weakref.ref(buffer), copy)
        return copy


def _dtype(node: fx.Node) -> str:
    value = node.meta["val"]
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else ""


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * DTYPE_NBYTES[_dtype(node)] if isinstance(value, torch.Tensor) else 0


def lent_operators(device: Device, graphs: Mapping[str, bytes]) -> dict[str, list[Lent]]:
    """Return the operators that a companion runs, by name of graph; `dump_graph` made the bytes."""
    from hetpipe.sdk.graph import load_graph

    if not isinstance(device, CompanionDevice):
        return {}
    return {name: device.lent(load_graph(data)) for name, data in graphs.items()}
