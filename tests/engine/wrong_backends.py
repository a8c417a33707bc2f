"""numpy devices with one fault each, such as `wrong:tanh:0`, for tests that look for the fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hetpipe.backends.numpy import NumpyBackend, NumpyBuffer, NumpyDevice
from hetpipe.backends.numpy.operators import OPERATORS
from torch import fx

from hetpipe.sdk.backend import Buffer
from hetpipe.sdk.graph import operator_name
from hetpipe.sdk.info import DeviceInfo

KINDS = (
    "right", "tanh", "le", "mm", "sqrt", "nan", "raises", "together", "unsteady", "random",
    "stale", "dies", "compiles", "between", "pairs", "uploads", "downloads",
    "halves", "lr",
)  # fmt: skip


class WrongBackend(NumpyBackend):
    name = "wrong"

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        return [replace(info, id=f"wrong:{kind}:0", backend="wrong") for kind in KINDS]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        return WrongDevice(info)


class WrongDevice(NumpyDevice):
    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self.kind = info.id.split(":")[1]
        self.calls = 0
        self.dead = False
        self.pairs: dict[int, Any] = {}
        self.downloaded = True

    def _compile(self, graph: fx.GraphModule) -> Any:
        program = super()._compile(graph)
        if self.kind == "compiles" and any("sigmoid" in operator_name(n) for n, _, _ in program[1]):
            raise ValueError("no code for this")
        return program

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        if self.dead:
            raise RuntimeError("the context is gone")
        placeholders, calls, outputs = program
        buffers = dict(zip(placeholders, inputs, strict=True))
        values: dict[fx.Node, Any] = {node: b.array for node, b in buffers.items()}  # type: ignore[attr-defined]
        if self.kind == "lr":  # scalars keep a program's first values
            first = {node: array.copy() for node, array in values.items() if not array.ndim}
            values |= self.pairs.setdefault(id(program), (program, first))[1]
        names = {operator_name(node) for node, _, _ in calls}
        for node, dtype, _ in calls:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with np.errstate(all="ignore"):
                result = OPERATORS[operator_name(node)](*args, **kwargs)
            result = np.asarray(result, dtype) if dtype else result
            values[node] = self._spoiled(operator_name(node), result, names, program)
        if self.kind == "between" and not self.downloaded:  # reuses memory too early
            values[outputs[0]] = values[outputs[0]] * np.float32(0.5)
        self.downloaded = False
        for node in outputs:
            if node not in buffers:
                buffers[node] = NumpyBuffer(self, values[node].copy(order="C"))
        return [buffers[node] for node in outputs]

    def _to_host(self, buf: Buffer, dst: Any) -> None:
        self.downloaded = True
        if self.kind == "downloads":
            raise OSError("bus")
        super()._to_host(buf, dst)

    def _to_device(self, src: Any) -> NumpyBuffer:
        if self.kind == "uploads":
            raise KeyError("no room")
        return super()._to_device(src)

    def _spoiled(self, name: str, result: Any, names: set[str], program: Any) -> Any:
        """Return the result of an operator, with the fault of this kind of device."""
        sigmoid = name == "aten.sigmoid.default"
        if self.kind == "tanh" and name == "aten.tanh.default":
            return result * np.float32(1.01)
        if self.kind == "mm" and name == "aten.mm.default":
            return result + np.float32(1e-3)
        if self.kind == "halves" and name == "aten.mm.default":
            return result * np.float32(0.5)
        if self.kind == "le" and name == "aten.le.Scalar":
            return ~result
        if self.kind == "sqrt" and name == "aten.sqrt.default" and result.ndim:
            return result * np.float32(0.9)
        if self.kind == "nan" and sigmoid:
            result = result.copy()
            result.flat[3] = np.nan
        if self.kind == "raises" and sigmoid:
            raise ValueError("boom 42")
        if self.kind == "pairs" and sigmoid and "aten.addmm.default" in names:
            raise ValueError("not these two")
        if self.kind == "dies" and sigmoid:
            self.dead = True
            raise RuntimeError("the context is gone")
        if self.kind == "together" and sigmoid and "aten.addmm.default" in names:
            return result * np.float32(1.5)
        if self.kind == "unsteady" and sigmoid:
            self.calls += 1
            return result + np.float32(0.25) * (self.calls % 3 == 0)
        if self.kind == "random" and sigmoid:
            self.calls += 1
            return result + np.float32(0.01 * self.calls)
        if self.kind == "stale" and sigmoid:
            _, first = self.pairs.setdefault(id(program), (program, result))
            return first
        return result
