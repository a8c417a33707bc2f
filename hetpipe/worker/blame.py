"""Adds the operator and the layer to a device's error.

If the error's text names no operator, the graph is compiled or run again, operator by operator.
"""

from __future__ import annotations

import errno
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
from torch import fx

from hetpipe.check.reference import operator_and_layer
from hetpipe.check.search import first_fault, others_fail
from hetpipe.errors import BackendError, BundleError, HetpipeError, UnsupportedOperatorError
from hetpipe.process import start_refusal
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import graph_calls, graph_inputs, operator_name
from hetpipe.sdk.host.parts import Part, Unit, part_of, units_of
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.sdk.inputs import form_of
from hetpipe.wire.wire import host_dtype

SEARCH_S = 20.0
"""Seconds after which the search for an operator ends; other workers wait meanwhile."""
LISTED = 8
"""The most operators that a message names."""

_DEVICE_METHODS = ("compile", "compile_all", "compile_ahead", "upload", "download", "download_part")


def compile_graphs(device: Device, graphs: Sequence[fx.GraphModule]) -> list[Executable]:
    """Call `Device.compile_all`. Raises `BackendError` with operator and layer if it fails."""
    try:
        return device.compile_all(graphs)
    except (UnsupportedOperatorError, BundleError):
        raise
    except Exception as error:
        if _names_operator(error, graphs):
            raise
        raise _compile_error(device, graphs, error) from error


def run_error(
    device: Device,
    graph: fx.GraphModule,
    inputs: Sequence[Buffer],
    donated: Collection[int],
    error: Exception,
) -> Exception:
    """Return a run's error; it names the failing operator, or else the operators of the graph."""
    if _names_operator(error, [graph]):
        return error
    try:
        place = _failing_operator(device, graph, inputs, donated)
    except Exception:  # an upload of zeros failed
        place = f"{_describe(graph)} failed, and uploads fail now: the device may be lost"
    return BackendError(f"{device.info.id}: {place}: {summary(error)}")


def summary(error: BaseException) -> str:
    """Return an error in one line: its text and, unless it is a `HetpipeError`, type and place."""
    if isinstance(error, HetpipeError):
        return str(error)
    if refusal := start_refusal(error):
        return refusal
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    cure = "; free space there, or set TMPDIR or HETPIPE_CACHE to a folder with space"
    return f"{type(error).__name__}: {error}".rstrip(": ") + place + (cure if full else "")


def trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def failing_method(error: BaseException) -> str:
    """Return the name of the device's method that raised, such as `upload`; empty if none did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if isinstance(frame.f_locals.get("self"), Device) and name in _DEVICE_METHODS:
            return name
    return ""


def _names_operator(error: Exception, graphs: Sequence[fx.GraphModule]) -> bool:
    """Return whether a device's error names an operator of the graphs."""
    calls = (node for graph in graphs for node in graph_calls(graph))
    text = str(error)
    return isinstance(error, HetpipeError) and any(operator_name(node) in text for node in calls)


def _compile_error(
    device: Device, graphs: Sequence[fx.GraphModule], error: Exception
) -> BackendError:
    """Return an error that names the first failing operator of the first failing graph."""
    end_s = time.monotonic() + SEARCH_S
    for graph in graphs:
        try:
            device.compile(graph)
        except Exception as graph_error:
            found = first_fault(_parts(graph, end_s), partial(_compile_fault, device))
            default = f"{_describe(graph)}, only each operator alone: {summary(graph_error)}"
            return BackendError(f"{device.info.id} cannot compile {found or default}")
    return BackendError(
        f"{device.info.id} cannot compile {len(graphs)} graphs together, only each graph alone: "
        f"{summary(error)}"
    )


def _compile_fault(device: Device, part: Part) -> str | None:
    """Describe why one operator does not compile; None if it compiles or is unsupported."""
    try:
        device.compile(part.graph)
    except UnsupportedOperatorError:
        return None
    except Exception as error:
        return f"{operator_and_layer(part.nodes[0])}: {summary(error)}"
    return None


def _failing_operator(
    device: Device, graph: fx.GraphModule, inputs: Sequence[Buffer], donated: Collection[int]
) -> str:
    """Run a graph operator by operator, and describe the first one that fails."""
    values: dict[fx.Node, Buffer] = {}
    for index, (node, buffer) in enumerate(zip(graph_inputs(graph), inputs, strict=True)):
        # The failed run may have overwritten donated inputs.
        values[node] = _zeros(device, node) if index in donated else buffer
    readers = Counter(source for node in graph_calls(graph) for source in node.all_input_nodes)
    for part in _parts(graph, time.monotonic() + SEARCH_S):
        if not all(source in values for source in part.sources):
            break
        try:
            outputs = _run(device, part, [values[source] for source in part.sources])
        except UnsupportedOperatorError:
            break  # the device runs this operator only together with others
        except Exception:
            place = f"{operator_and_layer(part.nodes[0])} failed"
            lost = ", and other operators fail now: the device may be lost"
            return place + lost if _is_lost(device, graph, part) else place
        values.update(zip(part.results, outputs, strict=True))
        for node in part.nodes:
            readers.subtract(node.all_input_nodes)
        for source in [source for source in values if readers[source] <= 0]:
            del values[source]
    return f"{_describe(graph)} failed, but no operator that was run alone failed"


def _run(device: Device, part: Part, inputs: Sequence[Buffer]) -> list[Buffer]:
    (executable,) = device.compile_all([part.graph])
    outputs, event, _ = check_ran(device, executable.run(inputs), len(part.results))
    event.wait()
    return list(outputs)


def _zeros(device: Device, node: fx.Node) -> Buffer:
    shape, dtype = form_of(node)
    buffer, event = upload(device, np.zeros(shape, host_dtype(dtype)))
    event.wait()
    return buffer


def _is_lost(device: Device, graph: fx.GraphModule, failed: Part) -> bool:
    """Return whether operators of other kinds also fail, on inputs of zeros."""

    def fails(unit: Unit) -> bool:
        if (part := part_of(graph, [unit])) is None:
            return False
        try:
            _run(device, part, [_zeros(device, source) for source in part.sources])
        except Exception:
            return True
        return False

    return others_fail(units_of(graph), {operator_name(failed.nodes[0])}, fails)


def _parts(graph: fx.GraphModule, end_s: float) -> Iterator[Part]:
    """Yield each operator of a graph as a separate graph, until `end_s` on the clock."""
    for unit in units_of(graph):
        if time.monotonic() > end_s:
            return
        if (part := part_of(graph, [unit])) is not None:
            yield part


def _describe(graph: fx.GraphModule) -> str:
    """Return a text with a graph's layers and operators."""
    calls = list(graph_calls(graph))
    layers = list(dict.fromkeys(str(node.meta["layer"]) for node in calls if "layer" in node.meta))
    names = list(dict.fromkeys(map(operator_name, calls)))
    ends = f" of layers {layers[0]} to {layers[-1]}" if layers else ""
    more = ", ..." if len(names) > LISTED else ""
    return f"a graph{ends} ({', '.join(names[:LISTED])}{more})"
