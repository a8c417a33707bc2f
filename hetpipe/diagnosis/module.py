"""Compares a rehearsal with the user's module in eager torch, to find errors of the capture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from hetpipe.capture.captured import Captured
from hetpipe.capture.export.eager import EagerRun
from hetpipe.capture.program import BUFFER, PARAM, RNG
from hetpipe.check.difference import half_digits, largest_magnitude
from hetpipe.check.reference import reference_values, tensors_of
from hetpipe.diagnosis.rehearsal import Array, Rehearsal, Start
from hetpipe.sdk.graph import graph_outputs, of_one_replica

ROUNDING = 8.0
"""Allowed error as a multiple of the error that eager torch makes in the model's dtype."""
LARGE = 0.375
"""Values beyond this power of a dtype's largest number may overflow in products and sums."""
FLOOR = 1e-3
"""For its tolerance, a gradient counts as at least this share of the largest gradient."""


class ModuleComparison:
    """Comparison of a rehearsal's captured programs with the user's module.

    `detail` describes the difference, and is empty if programs and module agree. `notes` lists the
    comparisons that were impossible, with the reasons.
    """

    def __init__(
        self, captured: Captured, rehearsal: Rehearsal, leaves: Mapping[str, Array]
    ) -> None:
        self.detail, self.notes = "", tuple[str, ...]()
        self._captured, self._rehearsal, self._leaves = captured, rehearsal, leaves
        dtypes = ("float32", captured.precision.compute, captured.precision.cut)
        self._digits = half_digits(*dtypes)
        smallest_max = min(torch.finfo(getattr(torch, name)).max for name in dtypes if name)
        if _draws_numbers(rehearsal.start):
            self.notes = (
                "the module itself by eager torch, because dropout draws different masks there",
            )
            return
        try:
            self._near = self._run(wide=False)
        except Exception as error:  # a module may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.notes = (f"the module itself by eager torch, which raises {reason}",)
            return
        try:
            self._exact = self._run(wide=True)
        except Exception:  # a module may depend on its dtype
            self._exact = self._near
            self.notes = ("the module itself in float64, in which it does not run",)
        values = [*rehearsal.start.values[PARAM].values(), *self._leaves.values()]
        tensors = [*map(torch.tensor, values), *(output for _, output in self._exact.outputs)]
        self._may_overflow = max(map(largest_magnitude, tensors)) > smallest_max**LARGE
        self.detail = self._losses() or self._gradients()

    def _run(self, wide: bool) -> EagerRun:
        request, start = self._rehearsal.start.request, self._rehearsal.start
        joined = self._captured.parts.join
        values = {**joined(start.values[PARAM]), **start.values[BUFFER]}
        ends = list(accumulate(request.samples, initial=0))
        feeds = [
            {name: array[low:high] for name, array in self._leaves.items()}
            for low, high in pairwise(ends)
        ]
        return self._captured.itself.run(values, feeds, request.loss_tangents, wide)

    def _losses(self) -> str:
        """Describe the first differing loss; for micro-batch 0 also the first differing layer."""
        for number, actual in enumerate(self._rehearsal.losses):
            near, exact = self._near.losses[number], self._exact.losses[number]
            if self._differs(torch.tensor(actual), torch.tensor(near), torch.tensor(exact)):
                layer = self._first_layer() if number == 0 else ""
                place = "" if self._rehearsal.whole else f" of micro-batch {number}"
                return f"its loss{place} is {actual:.6g}, the module's is {exact:.6g}{layer}"
        return ""

    def _gradients(self) -> str:
        """Describe the differing gradient whose parameter is nearest to the loss."""
        if not math.isfinite(self._rehearsal.loss):
            return ""
        found: dict[str, torch.Tensor] = {}
        for stage, named in zip(self._rehearsal.start.stages, self._rehearsal.grads, strict=True):
            arrays = {name: gradient.numpy() for name, gradient in named.items()}
            others = {name for name, owner, _ in stage.tied if owner != stage.stage}
            joined = self._captured.parts.join(arrays)
            found.update({n: torch.from_numpy(a) for n, a in joined.items() if n not in others})
        exact, near = self._exact.gradients, self._near.gradients
        largest = max((largest_magnitude(gradient) for gradient in exact.values()), default=0.0)
        for name in reversed(exact):
            actual = found.get(name, torch.zeros_like(exact[name]))
            if self._differs(actual, near[name], exact[name], FLOOR * largest):
                error = largest_magnitude(actual.double() - exact[name].double())
                return (
                    f"its gradient of {name} is off by {error:.3g}; the largest element of the "
                    f"module's gradient is {largest_magnitude(exact[name]):.3g}"
                )
        return ""

    def _differs(
        self, actual: torch.Tensor, near: torch.Tensor, exact: torch.Tensor, floor: float = 0.0
    ) -> bool:
        """Return whether a value differs from the exact one by more than rounding explains."""
        if self._may_overflow and not bool(actual.isfinite().all()):
            return False  # the order of a sum decides whether it overflows
        error = largest_magnitude(actual.double() - exact.double())
        spread = largest_magnitude(near.double() - exact.double())
        allowed = self._digits * max(largest_magnitude(exact), floor) + ROUNDING * spread
        return not (torch.equal(actual, near) or error <= allowed)

    def _first_layer(self) -> str:
        """Name the module that follows the last module whose output agrees with the programs."""
        values = _forward_values(self._rehearsal.start)
        first = ""
        for name, output in self._exact.outputs:
            right = output.reshape(-1).double()
            allowed = self._digits * max(largest_magnitude(right), 1e-30)
            if any(
                largest_magnitude(value - right) <= allowed
                for value in values.get(right.numel(), ())
            ):
                first = ""
            else:
                first = first or name
        return f"; the output of layer {first} is the first that differs" if first else ""


def _draws_numbers(start: Start) -> bool:
    passes = [program for stage in start.stages for program in stage.passes.values()]
    return any(slot.role == RNG for each in passes for slot in each.forward.inputs)


def _forward_values(start: Start) -> dict[int, list[torch.Tensor]]:
    """Return all flattened values of the first micro-batch's forwards, by number of elements."""
    rehearsal, values = Rehearsal(start), dict[int, list[Any]]()
    for run in rehearsal.runs():
        if run.name != "forward":
            break
        graph = of_one_replica(run.program.graph)
        by_node = reference_values(graph, run.inputs)
        rehearsal.done(run, [by_node[node] for node in graph_outputs(graph)])
        for value in by_node.values() if run.microbatch == 0 else ():
            for tensor in tensors_of(value):
                if tensor.is_floating_point():
                    values.setdefault(tensor.numel(), []).append(tensor.reshape(-1).double())
    return values
