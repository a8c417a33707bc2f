"""torch's operator database between transposes, from the capture to the kernels of each backend.

Inputs, results and the incoming gradients are transposed views; the gradient of a result with fewer
than two dimensions is an expanded view. Autograd in float64 gives the expected values.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from test_capture_devices import DEVICES, _run_on, opened
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from hetpipe.capture.export.decompositions import before_cut
from hetpipe.capture.export.flatten import write_by_where
from hetpipe.capture.passes.cut import StagePiece
from hetpipe.capture.passes.joint_graph import trace_joint
from hetpipe.capture.passes.partition import partition
from hetpipe.capture.program import CUT, INPUT, TANGENT, PassPrograms
from hetpipe.capture.slots import Key, drop_dead, placeholders, results
from hetpipe.check.difference import case_tolerance, eps_of
from hetpipe.check.reference import tensors_of
from hetpipe.conformance.check import BrokenRule
from hetpipe.conformance.database import Question, UnusableSample, entries, questions
from hetpipe.conformance.rig import compare
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.support import require_support

PARTS = 64
"""The number of test cases that share the database, whose import takes seconds."""
LOOKED_AT = 4
"""The most samples of an entry to try until one can be checked."""
ILL_CONDITIONED = 8
"""The allowed error, in units of torch's own float32 error."""
LIBRARY_SIZES = {"nn_functional_embedding_bag"}
"""Entries whose result sizes only the library knows: no host can read them."""
pytestmark = pytest.mark.filterwarnings("ignore")  # some samples are odd on purpose

Values = dict[Key, torch.Tensor]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a view with all dimensions in reverse order."""
    return x.permute(*reversed(range(x.ndim)))


class Between(nn.Module):
    """A function of tensors between transposes."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = tensors_of(self.fn(*[transposed(x) for x in tensors]))
        return tuple(transposed(y) if y.ndim > 1 or not y.requires_grad else y.sum() for y in found)


Results = tuple[list[torch.Tensor], list[torch.Tensor | None]]


class Case:
    """A sample of an entry: its tensors as a stage gets them, and the tangents of its results."""

    def __init__(self, question: Question) -> None:
        self.module = Between(question.fn)
        # The capture would take the same tensor twice for one input.
        self.leaves = [transposed(tensor).contiguous().clone() for tensor in question.tensors]
        self.tangents: dict[int, torch.Tensor] = {}
        outputs, _ = self.autograd()
        generator = torch.Generator().manual_seed(1)
        self.tangents = {
            index: torch.randn(y.shape, generator=generator).to(y.dtype)
            for index, y in enumerate(outputs)
            if y.requires_grad
        }

    def autograd(self, wide: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the results and the gradients of the inputs for the tangents; in float64 if
        `wide`.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if wide else before)
        try:
            leaves = [leaf.detach().clone() for leaf in self.leaves]
            leaves = [x.double() if wide and x.is_floating_point() else x for x in leaves]
            inputs = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
            outputs = list(self.module(*leaves))
            if not self.tangents or not inputs:
                return outputs, []
            sources = [outputs[index] for index in self.tangents]
            tangents = [self.tangents[index].to(outputs[index].dtype) for index in self.tangents]
            gradients = torch.autograd.grad(sources, inputs, tangents, allow_unused=True)
            return outputs, list(gradients)
        finally:
            torch.set_default_dtype(before)

    def piece(self) -> StagePiece:
        """Return the module as a stage's piece; the previous stage sends the floating inputs."""
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in self.leaves]
        program = torch.export.export(self.module, tuple(leaves), strict=False)
        program = program.run_decompositions(before_cut())
        signature = program.graph_signature
        if any(spec.kind is not InputKind.USER_INPUT for spec in signature.input_specs):
            raise UnusableSample("it makes tensors while it is exported")
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise UnusableSample("it changes its inputs")
        graph = program.graph_module.graph
        write_by_where(graph)
        drop_dead(graph)
        keys: list[Key] = [
            (CUT if leaf.requires_grad else INPUT, f"x{index}") for index, leaf in enumerate(leaves)
        ]
        assert len(placeholders(graph)) == len(keys)
        outputs: list[Key] = [(CUT, f"y{index}") for index in range(len(results(graph)))]
        differentiable = frozenset(key for key in keys if key[0] == CUT)
        return StagePiece(0, program.graph_module, tuple(keys), tuple(outputs), differentiable)

    def programs(self, piece: StagePiece, table: Any) -> PassPrograms:
        """Return the forward and backward programs for a backend's decompositions."""
        crossing = frozenset(f"y{index}" for index in self.tangents)
        return partition(trace_joint(piece, crossing, table), 1)

    def check(
        self, programs: PassPrograms, piece: StagePiece, execute: Callable[..., Values]
    ) -> None:
        """Run both programs and compare their results with autograd."""
        given = dict(zip(piece.inputs, self.leaves, strict=True))
        found = execute(programs.forward, given)
        wide, gradients_wide = self.exact
        near, gradients_near = self.single
        for index, (exact, single) in enumerate(zip(wide, near, strict=True)):
            self._compare(found[CUT, f"y{index}"], exact, single, f"result {index}")
        if programs.backward is None:
            return
        tangents = {(TANGENT, f"y{index}"): value for index, value in self.tangents.items()}
        found = execute(programs.backward, {**given, **found, **tangents})
        names = [name for role, name in piece.inputs if role == CUT]
        for name, exact, single in zip(names, gradients_wide, gradients_near, strict=True):
            assert ((TANGENT, name) in found) >= (exact is not None), f"no gradient of {name}"
            if exact is not None and single is not None:
                self._compare(found[TANGENT, name], exact, single, f"gradient of {name}")

    def _compare(
        self, found: torch.Tensor, exact: torch.Tensor, single: torch.Tensor, what: str
    ) -> None:
        wide, near = exact.numpy(force=True), single.numpy(force=True)
        terms = max([leaf.numel() for leaf in self.leaves], default=1) or 1
        limit = case_tolerance(wide, eps_of(near.dtype.name), terms)
        error = abs(near.astype("float64") - wide) if near.dtype.kind == "f" else np.zeros(1)
        error = error[np.isfinite(error)]
        limit = max(limit, ILL_CONDITIONED * float(error.max(initial=0.0)))
        forms = ", ".join(str(list(leaf.shape)) for leaf in self.leaves)
        compare(found.numpy(), wide, limit, f"{what} of transposed inputs {forms}")


def case_of(name: str) -> tuple[Case, StagePiece] | None:
    """Return the first sample of an entry that torch can export and differentiate."""
    for question, _ in zip(questions(name), range(LOOKED_AT), strict=False):
        if isinstance(question, UnusableSample):
            continue
        try:
            case = Case(question.forward or question)
            case.exact, case.single = case.autograd(wide=True), case.autograd()
            piece = case.piece()
            case.programs(piece, {})
        except Exception:  # torch cannot export the sample, or has no derivative
            continue
        if name not in LIBRARY_SIZES and not any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            for node in piece.module.graph.nodes
        ):
            return case, piece
    return None


def check_on_device(case: Case, piece: StagePiece, device_id: str) -> bool:
    """Check the sample on a device; return whether the device has its operators."""
    device = opened(device_id)
    programs = case.programs(piece, get_backend(device.info.backend).decompositions())
    try:
        for program in filter(None, (programs.forward, programs.backward)):
            require_support(device, program.graph)
    except UnsupportedOperatorError:
        return False
    case.check(programs, piece, functools.partial(_run_on, device))
    return True


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_the_database_between_transposes(part: int) -> None:
    asked: Counter[str] = Counter()
    wrong = []
    for name in entries():
        if crc32(name.encode()) % PARTS != part or (found := case_of(name)) is None:
            continue
        for device_id in DEVICES:
            try:
                asked[device_id] += check_on_device(*found, device_id)
            except BrokenRule as broken:
                wrong.append(f"{name} on {device_id}: {broken}")
    assert wrong == []
    assert all(asked[device_id] > 0 for device_id in DEVICES), asked
