"""Run stage programs with torch, node by node, in the order of a pipeline's data."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    COUNT,
    CUT,
    GRAD,
    INPUT,
    LOSS,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Program,
    StageGraphs,
)  # fmt: skip
from hetpipe.sdk.graph import core_decompositions

Env = dict[tuple[str, str], torch.Tensor]
TABLES: dict[str, Mapping[Any, Any]] = {"aten": {}, "core": core_decompositions()}
aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def run(program: Program, env: Mapping[tuple[str, str], torch.Tensor]) -> Env:
    """Execute a program on row-major tensors and check the shapes and dtypes of all slots."""
    nodes = list(program.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    values: dict[Any, Any] = {}
    for node, slot in zip(placeholders, program.inputs, strict=True):
        tensor = env[slot.key]
        assert tuple(tensor.shape) == slot.shape, slot
        assert str(tensor.dtype) == f"torch.{slot.dtype}", slot
        values[node] = tensor.contiguous()
    for node in nodes:
        if node.op != "call_function":
            assert node.op in ("placeholder", "output"), node.op
            continue
        assert isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target = aten.reshape.default if node.target in _VIEWS else node.target
        values[node] = target(*args, **kwargs)
        _check_meta(node, values[node])
    results = program.graph.graph.output_node().args[0]
    found: Env = {}
    for slot, node in zip(program.outputs, results, strict=True):
        tensor = values[node].contiguous()
        assert tuple(tensor.shape) == slot.shape, slot
        assert str(tensor.dtype) == f"torch.{slot.dtype}", slot
        assert slot.key not in found, f"{slot.key} is an output twice"
        found[slot.key] = tensor
    return found


def _check_meta(node: Any, value: Any) -> None:
    meta = node.meta["val"]
    if isinstance(value, torch.Tensor):
        assert meta.shape == value.shape, node.format_node()
        assert meta.dtype == value.dtype, node.format_node()


class Stages:
    """The state of all stages in one process."""

    def __init__(
        self,
        captured: Captured,
        graphs: Sequence[StageGraphs],
        seed: int = 7,
        halves: bool = False,
        execute: Callable[[Program, Env], Env] = run,
    ) -> None:
        self.captured, self.graphs, self.seed = captured, graphs, seed
        self.halves, self.execute = halves, execute
        self.params = {n: torch.from_numpy(v.copy()) for n, v in captured.parameters.items()}
        self.buffers = {n: torch.from_numpy(v.copy()) for n, v in captured.buffers.items()}
        self.loss = 0.0
        self.count = 0.0

    def step(
        self,
        batch: tuple[Any, Any],
        sizes: Sequence[int],
        tangents: Sequence[float],
        step: int = 0,
    ) -> list[dict[str, torch.Tensor]]:
        """Run a mini-batch and return each stage's gradients by parameter;

        tangents weight the losses.
        """
        leaves = {n: torch.from_numpy(v) for n, v in self.captured.leaves(*batch).items()}
        gradients: list[dict[str, torch.Tensor]] = [{} for _ in self.graphs]
        self.loss = self.count = 0.0
        lo = 0
        for size, tangent in zip(sizes, tangents, strict=True):
            rows: Env = {(INPUT, n): v[lo : lo + size] for n, v in leaves.items()}
            rows[RNG, "rng"] = torch.tensor([self.seed, step, lo])
            kept = self._forward(rows, size, tangent)
            self._backward(kept, rows, size, tangent, gradients)
            lo += size
        return gradients

    def _forward(self, rows: Env, size: int, tangent: float) -> list[Env]:
        cuts: Env = {}
        kept = []
        for stage in self.graphs:
            program = stage.passes[size].forward
            out = self.execute(program, {**self._given(stage), **rows, **cuts})
            kept.append({**cuts, **{k: v for k, v in out.items() if k[0] == SAVED}})
            for (role, name), value in out.items():
                if role == BUFFER:
                    self.buffers[name] = value
            cuts = {k: v for k, v in out.items() if k[0] == CUT}
            if (LOSS, LOSS) in out:
                self.loss += float(out[LOSS, LOSS]) * tangent
            if (COUNT, COUNT) in out:
                self.count += float(out[COUNT, COUNT])
        assert not cuts
        return kept

    def _backward(
        self,
        kept: list[Env],
        rows: Env,
        size: int,
        tangent: float,
        gradients: list[dict[str, torch.Tensor]],
    ) -> None:
        tangents: Env = {}
        for stage in reversed(self.graphs):
            passes = stage.passes[size]
            program = passes.backward
            if program is None:
                assert not tangents
                continue
            parts = (program,)
            if self.halves:
                assert passes.halves is not None
                parts = passes.halves
            index = stage.stage
            env = {**self._given(stage, forward=False), **rows, **kept[index], **tangents}
            dtypes = {slot.key: slot.dtype for slot in program.inputs}
            dtype = getattr(torch, dtypes.get((TANGENT, LOSS), "float32"))
            env[TANGENT, LOSS] = torch.tensor(tangent, dtype=dtype)
            assert {s.key for s in program.inputs} >= set(tangents), "a tangent goes unread"
            for slot in program.inputs:
                if slot.role == GRAD:
                    zeros = torch.zeros(slot.shape, dtype=getattr(torch, slot.dtype))
                    env[slot.key] = gradients[index].get(slot.name, zeros)
            out: Env = {}
            for part in parts:
                found = self.execute(part, env)
                assert not [k for k in found if k[0] == SAVED and k in env]
                env.update(found)  # a new TANGENT replaces the earlier one of its name
                out.update(found)
            gradients[index].update({k[1]: v for k, v in out.items() if k[0] == GRAD})
            tangents = {k: v for k, v in out.items() if k[0] == TANGENT}
        assert not tangents

    def _given(self, stage: StageGraphs, forward: bool = True) -> Env:
        env: Env = {(PARAM, n): v for n, v in self.params.items()}
        env.update({(CONSTANT, n): torch.from_numpy(v) for n, v in stage.constants.items()})
        updated = {
            s.name for p in stage.passes.values() for s in p.forward.outputs if s.role == BUFFER
        }
        for name, value in self.buffers.items():
            if forward or name not in updated:
                env[BUFFER, name] = value
        return env


def total(gradients: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter; gradients of tied parameters are summed over stages."""
    sums: dict[str, torch.Tensor] = {}
    for stage in gradients:
        for name, value in stage.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def rows_of(value: Any, lo: int, hi: int) -> Any:
    if isinstance(value, dict):
        return {k: rows_of(v, lo, hi) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(rows_of(v, lo, hi) for v in value)
    return value[lo:hi] if isinstance(value, torch.Tensor) else value


def eager(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: tuple[Any, Any],
    sizes: Sequence[int],
    tangents: Sequence[float],
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return loss, count and gradients of plain autograd on the same micro-batches."""
    model.train()
    model.zero_grad()
    loss = count = 0.0
    lo = 0
    for size, tangent in zip(sizes, tangents, strict=True):
        x, y = (rows_of(value, lo, lo + size) for value in batch)
        result = loss_fn(call(model, x), y)
        if isinstance(result, tuple):
            count += float(result[1])
            result = result[0]
        (result * tangent).backward()
        loss += float(result.detach()) * tangent
        lo += size
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss, count, gradients


def compare(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare up to rounding of the dtype; the floor is absolute, as true gradients may be zero."""
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), name
        return
    eps = 1e-10 if expected.dtype == torch.float64 else 2e-5
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((actual - expected).abs().max()) if expected.numel() else 0.0
    assert error <= eps * scale, f"{name}: error {error:.3g} of {scale:.3g}"


def check(
    case: tuple[nn.Module, Callable[..., Any], tuple[Any, Any]],
    captured: Captured,
    graphs: Sequence[StageGraphs],
    sizes: Sequence[int],
) -> None:
    """Compare programs with eager torch: loss, count, every gradient, every buffer."""
    model, loss_fn, batch = case
    tangents = [2.0**-i for i in range(1, len(sizes) + 1)]
    state = Stages(captured, graphs)
    found = total(state.step(batch, sizes, tangents))
    loss, counted, expected = eager(model, loss_fn, batch, sizes, tangents)
    assert abs(state.loss - loss) <= 2e-6 * max(1.0, abs(loss)), (state.loss, loss)
    assert state.count == counted
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        compare(found[name], value, name)
    buffers = dict(model.named_buffers())
    for name, value in state.buffers.items():
        compare(value, buffers[name], name)


def even_cuts(captured: Captured, stages: int) -> list[int]:
    """Return cuts for this number of stages, at most one per layer, of about equal layer counts."""
    count = len(captured.layer_graph(8))
    stages = min(stages, count)
    return [round(count * i / stages) for i in range(1, stages)]
