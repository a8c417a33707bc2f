"""Blame: an error of a device names the operator and the layer, whatever the device itself says.

Where it does not say it, the graph is compiled or run once more, operator by operator.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from torch import fx

from hetpipe.errors import BackendError, BundleError, HetpipeError, UnsupportedOperatorError
from hetpipe.process import start_refusal
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import graph_calls, graph_inputs, operator_name
from hetpipe.sdk.inputs import form_of
from hetpipe.sdk.parts import Part, part_of, units_of
from hetpipe.sdk.validation import check_ran, check_uploaded
from hetpipe.wire.wire import host_dtype

SEARCH_S = 20.0
"""Seconds that the search for an operator may take; other workers wait meanwhile."""
LISTED = 8  # operators in a message
LOST = 3  # other operators that fail, too, before a device is taken for lost


def compile_graphs(device: Device, graphs: Sequence[fx.GraphModule]) -> list[Executable]:
    """`Device.compile_all`. Raises `BackendError` with operator and layer for any exception."""
    try:
        return device.compile_all(graphs)
    except (UnsupportedOperatorError, BundleError):
        raise
    except Exception as error:
        if _is_clear(error, graphs):
            raise
        raise _compile_error(device, graphs, error) from error


def run_error(
    device: Device,
    graph: fx.GraphModule,
    inputs: Sequence[Buffer],
    donated: Collection[int],
    error: Exception,
) -> Exception:
    """The error to raise for one of a run: with operator and layer, or else all that there are."""
    if _is_clear(error, [graph]):
        return error
    try:
        place = _place_of_run(device, graph, inputs, donated)
    except Exception:  # not even an input can be made any more
        place = f"{_named(graph)} failed, and uploads fail now: the device may be lost"
    return BackendError(f"{device.info.id}: {place}: {summary(error)}")


def summary(error: BaseException) -> str:
    """One line: a `HetpipeError` speaks for itself, others need their type and place."""
    if isinstance(error, HetpipeError):
        return str(error)
    if refusal := start_refusal(error):
        return refusal
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".rstrip(": ") + place


def trace_of(error: BaseException) -> str:
    """The traceback as text."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def deed_of(error: BaseException) -> str:
    """The method of a device in which an exception was raised, `upload` say; empty for none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), Device) and frame.f_code.co_name in _DEEDS:
            return frame.f_code.co_name
    return ""


_DEEDS = ("compile", "compile_all", "compile_ahead", "upload", "download", "download_part")


def _is_clear(error: Exception, graphs: Sequence[fx.GraphModule]) -> bool:
    """Whether an error of the device names an operator."""
    calls = (node for graph in graphs for node in graph_calls(graph))
    text = str(error)
    return isinstance(error, HetpipeError) and any(operator_name(node) in text for node in calls)


def _compile_error(
    device: Device, graphs: Sequence[fx.GraphModule], error: Exception
) -> BackendError:
    end_s = time.monotonic() + SEARCH_S
    for graph in graphs:
        try:
            device.compile(graph)
        except Exception as own:
            error = own
        else:
            continue
        for part in _parts(graph, end_s):
            try:
                device.compile(part.graph)
            except UnsupportedOperatorError:
                continue
            except Exception as own:
                place = f"{device.info.id} cannot compile {_operator(part)}"
                return BackendError(f"{place}: {summary(own)}")
        return BackendError(
            f"{device.info.id} cannot compile {_named(graph)}, though each operator by itself: "
            f"{summary(error)}"
        )
    return BackendError(
        f"{device.info.id} cannot compile {len(graphs)} graphs together, though each by itself: "
        f"{summary(error)}"
    )


def _place_of_run(
    device: Device, graph: fx.GraphModule, inputs: Sequence[Buffer], donated: Collection[int]
) -> str:
    """The operator that fails by itself, or all that there are."""
    values: dict[fx.Node, Buffer] = {}
    for index, (node, buffer) in enumerate(zip(graph_inputs(graph), inputs, strict=True)):
        values[node] = _zeros(device, node) if index in donated else buffer  # overwritten by now
    readers = Counter(source for node in graph_calls(graph) for source in node.all_input_nodes)
    for part in _parts(graph, time.monotonic() + SEARCH_S):
        if not all(source in values for source in part.sources):
            break
        try:
            outputs = _run(device, part, [values[source] for source in part.sources])
        except UnsupportedOperatorError:
            break  # it runs together with others alone
        except Exception:
            if _is_lost(device, graph, part):
                return f"{_operator(part)} failed, and others fail now: the device may be lost"
            return f"{_operator(part)} failed"
        values.update(zip(part.results, outputs, strict=True))
        for node in part.nodes:
            readers.subtract(node.all_input_nodes)
        for source in [source for source in values if readers[source] <= 0]:
            del values[source]
    return f"{_named(graph)} failed, though no operator of it fails by itself"


def _run(device: Device, part: Part, inputs: Sequence[Buffer]) -> list[Buffer]:
    (executable,) = device.compile_all([part.graph])
    outputs, event, _ = check_ran(device, executable.run(inputs), len(part.results))
    event.wait()
    return list(outputs)


def _zeros(device: Device, node: fx.Node) -> Buffer:
    shape, dtype = form_of(node)
    buffer, event = check_uploaded(device, device.upload(np.zeros(shape, host_dtype(dtype))))
    event.wait()
    return buffer


def _is_lost(device: Device, graph: fx.GraphModule, failed: Part) -> bool:
    """Whether operators of other kinds fail as well, on zeros."""
    tried = {operator_name(failed.nodes[0])}
    for part in _parts(graph, time.monotonic() + SEARCH_S):
        if (name := operator_name(part.nodes[0])) in tried:
            continue
        try:
            _run(device, part, [_zeros(device, source) for source in part.sources])
        except Exception:
            tried.add(name)
            if len(tried) > LOST:
                break
        else:
            return False
    return len(tried) > 1


def _parts(graph: fx.GraphModule, end_s: float) -> Iterator[Part]:
    """The units of a graph as graphs, until the time is over."""
    for unit in units_of(graph):
        if time.monotonic() > end_s:
            return
        if (part := part_of(graph, [unit])) is not None:
            yield part


def _operator(part: Part) -> str:
    return f"{operator_name(part.nodes[0])} of layer {part.nodes[0].meta.get('layer', '?')}"


def _named(graph: fx.GraphModule) -> str:
    """A graph by its layers and operators."""
    calls = list(graph_calls(graph))
    layers = list(dict.fromkeys(str(node.meta["layer"]) for node in calls if "layer" in node.meta))
    names = list(dict.fromkeys(map(operator_name, calls)))
    ends = f" of layers {layers[0]} to {layers[-1]}" if layers else ""
    more = ", ..." if len(names) > LISTED else ""
    return f"a graph{ends} ({', '.join(names[:LISTED])}{more})"
