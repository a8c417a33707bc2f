"""Checks of a device's description, its capabilities, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hetpipe.check.reference import tensors_of
from hetpipe.conformance.check import NotAsked, check, expect, expect_refusal
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import Rig, compare, trace
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Backend, Buffer, Device
from hetpipe.sdk.graph import dtype_name, graph_calls, operator_name
from hetpipe.sdk.host.registry import devices_of, get_backend
from hetpipe.sdk.host.validation import check_devices
from hetpipe.sdk.info import HOST_MEMORY, host_memory_nbytes


@check(
    "contract/description",
    "discover returns the same valid descriptions every time, and the opened "
    "device has the same description",
    "an id that changes, or a device whose description differs from its backend's",
)
def _(rig: Rig) -> None:
    infos = [devices_of(rig.info.backend) for _ in range(2)]
    expect(
        infos[0] == infos[1], f"discover returns {infos[0]} first and {infos[1]} the second time"
    )
    check_devices(rig.info.backend, infos[0])
    known = {info.id: info for info in infos[0]}
    expect(
        rig.info.id in known, f"{rig.info.id} is open, but discover returns only {', '.join(known)}"
    )
    expect(
        rig.info == known[rig.info.id],
        f"the opened device describes itself as {rig.info}, discover returns {known[rig.info.id]}",
    )


@check(
    "contract/abilities",
    "a declared capability has its methods: chunks need download_part, "
    "compiles_ahead needs compile_ahead, exports needs export and build",
    "a capability that was copied from another backend",
)
def _(rig: Rig) -> None:
    can, kind = rig.info.capabilities, type(rig.device)
    for declared, method in (
        (can.chunks, "download_part"),
        (can.compiles_ahead, "compile_ahead"),
        (can.exports, "export"),
        (can.exports, "build"),
    ):
        own = getattr(kind, method) is not getattr(Device, method)
        expect(
            own or not declared, f"the device declares the capability but has no method {method}"
        )
    backend = get_backend(rig.info.backend)
    environment = backend.worker_environment(rig.info, 1)
    texts = all(isinstance(text, str) for pair in environment.items() for text in pair)
    expect(texts, f"worker_environment returns {environment!r}, it should return a dict of strings")
    for finding in backend.describe():
        level, text, cure = finding
        expect(
            level in ("ok", "repaired", "missing", "broken")
            and isinstance(text, str)
            and isinstance(cure, str),
            f"describe returns {finding!r}, it should return (level, text, cure)",
        )
    if rig.info.memory_domain == HOST_MEMORY:
        there = host_memory_nbytes()
        said = rig.info.memory_nbytes
        expect(said <= there, f"memory_nbytes is {said}, but the host has {there} bytes")
    nbytes = rig.device.memory_used_nbytes()
    expect(nbytes is None or nbytes >= 0, f"memory_used_nbytes is {nbytes!r}")


@check(
    "contract/refusals",
    "compile raises UnsupportedOperatorError for the nodes that `supports` refuses, and only then",
    "`supports` and compile disagree about a node",
)
def _(rig: Rig) -> None:
    x = normal(4, 6).abs() + 0.1
    functions: list[Callable[..., Any]] = [
        torch.erfinv, torch.lgamma, torch.digamma, torch.special.i0e, torch.linalg.det,
        lambda x: x.cumsum(0), lambda x: x.sort(0)[0],
        torch.sin, torch.exp, torch.relu, lambda x: x + 1.0, lambda x: torch.mm(x, x.t()),
    ]  # fmt: skip
    refused = 0
    for fn in functions:
        inputs = normal(4, 4) if fn is torch.linalg.det else x
        graph = trace(fn, [inputs], rig.table)
        reasons, names = {}, dict.fromkeys(map(operator_name, graph_calls(graph)))
        for node in graph_calls(graph):
            first, second = rig.device.supports(node), rig.device.supports(node)
            name = operator_name(node)
            expect(
                first == second,
                f"supports({name}) returns {first!r} first and {second!r} the second time",
            )
            if first is not None:
                reasons[name] = first
        refused += bool(reasons)
        try:
            executable = rig.device.compile(graph)
            rig.run(executable, [rig.put(inputs)])
        except UnsupportedOperatorError as error:
            expect(
                bool(reasons),
                f"`supports` accepts all of {', '.join(names)}, but compile raises: {error}",
            )
            expect(rig.info.id in str(error), f"the error does not name the device: {error}")
            expect(
                any(name in str(error) for name in reasons),
                f"the error names none of {', '.join(reasons)}: {error}",
            )
        else:
            expect(not reasons, f"`supports` refuses {reasons}, but compile accepts it")


def _several(*functions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: tuple(fn(*inputs) for fn in functions)


_ALIKE: dict[str, tuple[Callable[..., Any], ...]] = {
    "constants": (
        _several(lambda x: x + 1.0, lambda x: x * 0.5, lambda x: torch.where(x > 0.0, x, 3.0)),
        _several(lambda x: x + 2.0, lambda x: x * 1.5, lambda x: torch.where(x > 0.5, x, 4.0)),
    ),
    "dimensions": (
        _several(lambda x: x.sum(0), lambda x: x.flip(0), lambda x: x[1:4], lambda x: x[:, 2]),
        _several(lambda x: x.sum(1), lambda x: x.flip(1), lambda x: x[2:5], lambda x: x[:, 3]),
    ),
    "orders of inputs": (lambda a, b: a - b, lambda a, b: b - a),
    "dtypes of a cast": (
        lambda x: (x * 3.0).to(torch.int64), lambda x: (x * 3.0).to(torch.int32),
        lambda x: (x * 3.0).to(torch.bool),
    ),
}  # fmt: skip
"""Groups of functions; the graphs of a group differ in a single respect."""
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.float64, torch.int16, torch.uint8)


@check(
    "contract/programs apart",
    "graphs that differ in a constant, an argument, a shape or a dtype are different programs",
    "a cache of compiled graphs whose key lacks the constants or the dtypes",
)
def _(rig: Rig) -> None:
    square, other = normal(6, 6), normal(6, 6, seed=1)
    programs: list[tuple[str, Callable[..., Any], list[torch.Tensor]]] = []
    for name, functions in _ALIKE.items():
        inputs = [square, other] if name == "orders of inputs" else [square]
        programs += [(name, fn, inputs) for fn in functions]
    programs += [("shapes", torch.t, [normal(*shape)]) for shape in ((4, 9), (9, 4))]
    kept = [dtype for dtype in _DTYPES if dtype_name(dtype) in rig.info.dtypes]
    whole = torch.tensor([3, 100, 7, 1])
    programs += [("dtypes of inputs", lambda x: x + x, [whole.to(dtype)]) for dtype in kept]
    graphs = {}
    for number, (_, fn, inputs) in enumerate(programs):
        try:
            graphs[number] = rig.graph(fn, *inputs)
        except NotAsked:
            continue
    if not graphs:
        raise NotAsked("refused: all graphs")
    together = dict(zip(graphs, rig.device.compile_all(list(graphs.values())), strict=True))
    alone = {number: rig.device.compile(graph) for number, graph in graphs.items()}
    for how, executables in (("together", together), ("alone", alone)):
        for number, executable in executables.items():
            name, fn, inputs = programs[number]
            expected = [tensor.contiguous().numpy() for tensor in tensors_of(fn(*inputs))]
            for index, (actual, right) in enumerate(
                zip(rig.results(executable, *inputs), expected, strict=True)
            ):
                where = f"graphs that differ in {name}, compiled {how}: result {index} of one graph"
                expect(actual.dtype == right.dtype, f"{where} is {actual.dtype}, not {right.dtype}")
                compare(actual, right, 1e-5, where)


@check(
    "contract/wrong inputs",
    "a run whose inputs do not fit the graph raises BackendError, and the device works afterwards",
    "inputs that the device does not compare with the graph; use hetpipe.sdk.check_inputs",
)
def _(rig: Rig) -> None:
    a, b = normal(3, 4), normal(3, 4, seed=1)
    executable = rig.compile(lambda a, b: a + b, a, b)
    right = [rig.put(a), rig.put(b)]
    other = next((d for d in ("int32", "int64", "bool") if d in rig.info.dtypes), "float32")
    wrong = {
        "one input of two": right[:1],
        "three inputs for two": [*right, right[0]],
        "another shape": [right[0], rig.put(normal(4, 3))],
        "fewer elements": [right[0], rig.put(normal(3))],
        "another dtype": [right[0], rig.put(np.ones((3, 4), other))],
    }
    for name, inputs in wrong.items():
        expect_refusal(partial(rig.run, executable, inputs), f"a run with {name}")
    (result,) = rig.run(executable, right)
    compare(rig.get(result), (a + b).numpy(), 1e-5, "a run with right inputs after the others")


@check(
    "contract/buffers of others",
    "a run with a buffer of another device raises BackendError",
    "the device does not check the class of a buffer",
)
def _(rig: Rig) -> None:
    class Foreign(Buffer):
        def __init__(self) -> None:
            self.device = rig.device
            self.shape, self.dtype = (3,), "float32"

    executable = rig.compile(lambda a: a + 1.0, normal(3))
    expect_refusal(lambda: rig.run(executable, [Foreign()]), "a run")
    expect_refusal(lambda: rig.get(Foreign()), "a download")


@check(
    "contract/opened again",
    "a device can be closed and opened again in the same process",
    "state of the driver that is created once and destroyed with the device",
)
def _(rig: Rig) -> None:
    backend: Backend = get_backend(rig.info.backend)
    for _ in range(2):
        device = backend.open(rig.info)
        other = Rig(device)
        x = normal(5)
        results = other.results(other.compile(lambda x: x * 2.0, x), x)
        compare(results[0], (x * 2.0).numpy(), 1e-6, "a result of a device that was opened again")
        device.close()
    x = normal(5)
    results = rig.results(rig.compile(lambda x: x * 2.0, x), x)
    compare(results[0], (x * 2.0).numpy(), 1e-6, "the first device, after another was closed")
