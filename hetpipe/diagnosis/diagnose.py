"""Diagnosis of a mini-batch: runs every program on its device and compares it with the reference.

The reference values come from torch in float64 on this processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import fx

from hetpipe.capture.program import CUT, LOSS
from hetpipe.check.difference import Difference, eps_of, tensor_difference
from hetpipe.check.reference import is_comparable, reference_values, tensors_of, terms_of
from hetpipe.crew.workers import Workers
from hetpipe.diagnosis.record import Culprit, Diagnosis, Verdict
from hetpipe.diagnosis.rehearsal import Rehearsal, Run, Start
from hetpipe.diagnosis.report import culprit_of, is_finite, source_of
from hetpipe.diagnosis.search import Finding, Given, Search, Trials, declared, half_of
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.sdk.graph import graph_calls, graph_inputs, graph_outputs, of_one_replica
from hetpipe.sdk.operators.recurrent import is_workspace
from hetpipe.worker.graph_trials import DeviceFailedError, Held
from hetpipe.worker.stage import CHECKED

Outputs = list[torch.Tensor | None]
"""Outputs of a program; None for workspaces, which only the device can read."""


class _FoundError(HetpipeError):
    """Ends a rehearsal, because the culprit is found."""

    def __init__(self, verdict: Verdict, culprit: Culprit) -> None:
        super().__init__(str(culprit))
        self.verdict, self.culprit = verdict, culprit


def diagnose(crew: Workers, start: Start) -> tuple[Diagnosis, Rehearsal]:
    """Run a mini-batch's programs on the devices and in the reference until the results differ.

    The workers' stages stay untouched. Raises `HetpipeError` for a graph that torch cannot compute,
    and `WorkerError` if a worker dies.
    """
    rehearsal = Rehearsal(start)
    examination = _Examination(crew, rehearsal)
    verdict: Verdict = "healthy"
    try:
        for run in rehearsal.runs():
            rehearsal.done(run, examination.outputs(run))
        culprit = examination.not_finite
        verdict = "healthy" if culprit is None else "numbers"
    except _FoundError as found:
        verdict, culprit = found.verdict, found.culprit
    finally:
        with suppress(WorkerError):  # the earlier call has already raised for a dead worker
            examination.close()
    if verdict == "healthy" and rehearsal.whole and not math.isfinite(rehearsal.loss):
        verdict = "numbers"
    return Diagnosis(verdict, rehearsal.loss, examination.count, culprit), rehearsal


@dataclass(frozen=True)
class _Compiled:
    """A compiled program: the terms of its longest sum, and the epsilon of its coarsest dtype."""

    name: str
    terms: int
    eps: float


class _Examination:
    """Compares the runs with the reference, one by one."""

    def __init__(self, crew: Workers, rehearsal: Rehearsal) -> None:
        self.not_finite: Culprit | None = None  # the first reference value that is not finite
        self.count = 0  # compared runs
        self._rehearsal = rehearsal
        self._devices = {member: info.id for member, info in crew.infos.items()}
        self._trials = [
            Trials(crew, member, f"{n} on {member}: ")
            for n, member in enumerate(rehearsal.start.members)
        ]
        self._compiled: dict[int, _Compiled] = {}  # by id() of the program

    def close(self) -> None:
        """Free the graphs and values on the devices."""
        for trials in self._trials:
            trials.forget()

    def outputs(self, run: Run) -> list[torch.Tensor]:
        """Return a run's outputs from its device; for a workspace, return the reference value.

        Raises `_FoundError` if device and reference differ.
        """
        graph = of_one_replica(run.program.graph)
        values = reference_values(graph, run.inputs)
        given = [self._given(run, index) for index in range(len(run.inputs))]
        pairs = zip(graph_inputs(graph), given, strict=True)
        held = {node: value for node, value in pairs if isinstance(value, Held)}
        search = Search(self._trials[run.stage], graph, values, held)
        outputs = self._run(run, search, given)
        self.count += 1
        self._compare(run, search, outputs)
        if run.is_first:
            self._repeat(run, search, given, outputs)
        nodes = graph_outputs(graph)
        self._watch(run, search, nodes)
        pairs_out = zip(nodes, outputs, strict=True)
        return [values[node] if own is None else own for node, own in pairs_out]

    def _given(self, run: Run, index: int) -> Given:
        name = self._rehearsal.held_name(run, run.program.inputs[index])
        return run.inputs[index] if name is None else self._trials[run.stage].held(name)

    def _program(self, run: Run, search: Search) -> _Compiled:
        """Return the run's program on the device; compile it at its first run."""
        key = id(run.program)
        if key not in self._compiled:
            name = self._trials[run.stage].compile(search.graph)
            terms = max(map(terms_of, graph_calls(search.graph)), default=1)
            nodes = search.graph.graph.nodes
            tensors = [t for node in nodes for t in tensors_of(node.meta.get("val"))]
            eps = eps_of(*(tensor.dtype for tensor in tensors))
            self._compiled[key] = _Compiled(name, terms, eps)
        return self._compiled[key]

    def _run(self, run: Run, search: Search, given: Sequence[Given], keeps: bool = True) -> Outputs:
        """Return the device's outputs; if `keeps`, the saved tensors also stay on the device."""
        nodes = graph_outputs(search.graph)
        names = [self._rehearsal.held_name(run, slot) for slot in run.program.outputs]
        kept = {index: name for index, name in enumerate(names) if keeps and name is not None}
        unread = frozenset(index for index, node in enumerate(nodes) if is_workspace(node))
        try:
            name = self._program(run, search).name
            outputs = self._trials[run.stage].run(name, given, run.donate, kept, unread)
        except DeviceFailedError as error:
            self._fail(run, search, str(error))
        pairs = zip(outputs, nodes, strict=True)
        return [declared(output, node.meta["val"].dtype) for output, node in pairs]

    def _compare(self, run: Run, search: Search, outputs: Outputs) -> None:
        """Raise `_FoundError` if the outputs differ from the reference."""
        parted = self._parted(run, search, outputs, search.values.__getitem__)
        if not parted:
            return
        if (finding := search.alone(each.output for each in parted)) is not None:
            verdict: Verdict = "operator" if search.is_steady(finding) else "unsteady"
            self._blame(verdict, run, finding, search)
        beyond = [each for each in parted if self._is_beyond(search, each)]
        if not beyond:
            return  # accumulated rounding explains the difference
        if (finding := search.together()) is not None:
            self._blame("combination", run, finding, search)
        if (finding := search.unsteady()) is not None:
            self._blame("unsteady", run, finding, search)
        self._blame("program", run, beyond[0], search)

    def _repeat(self, run: Run, search: Search, given: Sequence[Given], outputs: Outputs) -> None:
        """Run on inputs times 0.5, then on the inputs; raise if that run differs from `outputs`."""
        first = dict(zip(graph_outputs(search.graph), outputs, strict=True))
        self._run(run, search, [half_of(value) for value in given], keeps=False)
        again = self._run(run, search, given, keeps=False)
        for found in self._parted(run, search, again, first.__getitem__):
            if self._is_beyond(search, found):
                self._blame("unsteady", run, search.unsteady() or found, search)

    def _parted(
        self,
        run: Run,
        search: Search,
        outputs: Outputs,
        expected: Callable[[fx.Node], torch.Tensor | None],
    ) -> list[Finding]:
        """Return the outputs whose difference from the expected values exceeds the tolerance."""
        compiled, parted = self._program(run, search), []
        for node, actual in zip(graph_outputs(search.graph), outputs, strict=True):
            right = expected(node)
            if actual is not None and right is not None and is_comparable(node):
                found = tensor_difference(actual, right, compiled.terms, compiled.eps)
                if found.is_wrong:
                    parted.append(Finding((), node, found, actual))
        return parted

    @staticmethod
    def _is_beyond(search: Search, finding: Finding) -> bool:
        """Return whether the difference is larger than rounding in all operators explains."""
        found = finding.difference
        return found.error > found.allowed + search.allowed(finding.output)

    def _fail(self, run: Run, search: Search, text: str) -> NoReturn:
        """Raise `_FoundError` for an error of the device, with the faulty operator if found."""
        finding = search.alone() or search.together()
        if finding is None:
            whole = Difference(math.inf, 0.0)
            finding = Finding((), graph_outputs(search.graph)[0], whole, failure=text)
        elif not finding.failure:  # the operator's wrong result makes a later operator raise
            self._blame("operator", run, finding, search)
        elif search.fails_elsewhere(finding):
            text = f"{text}; the device now raises in other operators, too, so it may be lost"
            finding = Finding((), finding.output, finding.difference, failure=text)
        self._blame("failed", run, finding, search)

    def _blame(self, verdict: Verdict, run: Run, finding: Finding, search: Search) -> NoReturn:
        device = self._devices[run.member]
        verdict = "failed" if finding.failure else verdict
        raise _FoundError(verdict, culprit_of(run, device, finding, search.values))

    def _watch(self, run: Run, search: Search, nodes: Sequence[fx.Node]) -> None:
        """Record the first reference value that is not finite."""
        for node, slot in zip(nodes, run.program.outputs, strict=True):
            value = search.values[node]
            if self.not_finite is not None or slot.role not in CHECKED or is_finite(value):
                continue
            if slot.role == LOSS and self._rehearsal.start.request.whole_loss is not None:
                continue  # no loss of a micro-batch is used
            if slot.role == CUT and bool((value.isfinite() | value.isneginf()).all()):
                continue  # minus infinity may come from an attention mask
            device = self._devices[run.member]
            self.not_finite = source_of(run, device, search.graph, search.values, node)
