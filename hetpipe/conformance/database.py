"""Checks with torch's operator database: its samples, forward and backward, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import fx

from hetpipe.check.difference import Array, case_tolerance, eps_of, errors_of, largest_of
from hetpipe.check.reference import float64_results, tensors_of
from hetpipe.conformance.check import CHECKS, BrokenRule, Check, Level, NotAsked
from hetpipe.conformance.rig import Rig, compare, forms_of, trace
from hetpipe.sdk.graph import graph_calls

LOOKED_AT = 24
"""Number of an entry's first samples to choose from; the largest of these is tried first."""
SEED = 0
"""Random seed, so that every run gets the same samples."""


class UnusableSample(Exception):
    """No device can run the sample, for a reason in torch; the message gives the reason."""


@cache
def entries() -> dict[str, Any]:
    """Return the entries with float32, by name. Raises `ImportError` without torch's tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {entry.formatted_name: entry for entry in op_db if torch.float32 in entry.dtypes}


@dataclass(frozen=True)
class Question:
    """A function of tensors, with its results in float64 (`wide`) and in its own dtypes (`near`).

    The first `values` results are the operator's; the remaining results are the gradients with
    respect to the floating inputs.
    """

    fn: Callable[..., Any]
    tensors: list[torch.Tensor]
    wide: list[Array]
    near: list[Array]
    values: int
    forward: Question | None = None
    """The same question without gradients."""

    def traced(self, table: Any) -> tuple[Question, fx.GraphModule]:
        """Return a question and its graph: this one, or `forward` if torch cannot trace gradients.

        Raises `UnusableSample` if torch can trace neither, or if results are random, and `NotAsked`
        if only the trace with the backend's decompositions fails.
        """
        try:
            graph = trace(self.fn, self.tensors, table)
        except Exception as error:
            try:
                trace(self.fn, self.tensors, {})
            except Exception as reason:
                if self.forward is not None:
                    return self.forward.traced(table)
                raise UnusableSample(f"torch cannot trace it: {_first_line(reason)}") from None
            text = _first_line(error)
            raise NotAsked(f"refused: traced with the backend's decompositions, {text}") from error
        if any(map(_is_random, graph_calls(graph))):
            raise UnusableSample("its results are random")
        return self, graph


def questions(name: str) -> Iterator[Question | UnusableSample]:
    """Yield, for each sample of an entry, a question or the reason why no device can run it.

    A question has gradients if torch can compute them.
    """
    entry = entries()[name]
    torch.manual_seed(SEED)
    every = entry.sample_inputs("cpu", torch.float32, requires_grad=False)
    samples = [(sample, _tensors(sample)) for sample in islice(every, LOOKED_AT)]
    if samples:
        sizes = [sum(tensor.numel() for tensor in tensors) for _, tensors in samples]
        samples.insert(0, samples.pop(sizes.index(max(sizes))))
    for sample, tensors in samples:
        try:
            yield _question(entry, sample, tensors)
        except UnusableSample as reason:
            yield reason


def _tensors(sample: Any) -> list[torch.Tensor]:
    every = tensors_of([sample.input, *sample.args, *sample.kwargs.values()])
    return [tensor.detach() for tensor in every]


def _question(entry: Any, sample: Any, tensors: list[torch.Tensor]) -> Question:
    fn = _function(entry, sample)
    if entry.formatted_name.startswith(("empty", "new_empty")):
        raise UnusableSample("its results are not initialised")
    try:
        near = [each.numpy() for each in tensors_of(fn(*tensors))]
        wide = float64_results(fn, tensors)
    except Exception as error:
        raise UnusableSample(f"torch cannot run it: {_first_line(error)}") from error
    if any(array.dtype.kind == "c" for array in near):
        raise UnusableSample("its results are complex")
    if not near:
        raise UnusableSample("it has no tensor as a result")
    alone = Question(fn, tensors, wide, near, len(near))
    return (entry.supports_autograd and _with_gradients(alone)) or alone


def _with_gradients(alone: Question) -> Question | None:
    """Return the question with gradients of the sum of squared results, if torch has them."""
    fn, tensors = alone.fn, alone.tensors
    places = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def both(*tensors: torch.Tensor) -> Any:
        inputs = [t.detach().requires_grad_(i in places) for i, t in enumerate(tensors)]
        with torch.enable_grad():
            results = tensors_of(fn(*inputs))
            squares = [(each * each).sum() for each in results if each.requires_grad]
            total = torch.stack(squares).sum()
            wanted = [inputs[i] for i in places]
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        return [each.detach() for each in results], gradients

    try:
        near = [each.numpy() for each in tensors_of(both(*tensors))]
        wide = float64_results(both, tensors)
    except Exception:
        return None
    if len(near) != len(wide):
        return None
    return Question(both, tensors, wide, near, alone.values, alone)


def _function(entry: Any, sample: Any) -> Callable[..., Any]:
    """Return the operator as a function of a sample's tensors, in their order."""

    def fn(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)

        def filled(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(given).clone()  # some operators change their inputs
            if isinstance(value, (list, tuple)):
                return type(value)([filled(each) for each in value])
            return value

        first, args = filled(sample.input), filled(list(sample.args))
        kwargs = {key: filled(value) for key, value in sample.kwargs.items()}
        return entry.op(first, *args, **kwargs)

    return fn


def _is_random(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers, which differ from device to device."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]


SAMPLES = 3
"""Samples that a device runs per entry: the first usable ones."""
PATIENCE = 4
"""Number of unusable samples after which an entry without a usable sample is abandoned."""
ILL_CONDITIONED = 8
"""A result may differ by this multiple of torch's float32 error, if the tolerance is smaller."""


def check_entry(name: str, rig: Rig, samples: int = SAMPLES) -> None:
    """Run the first `samples` usable samples of an entry, forward and with gradients.

    Raises `BrokenRule` for a wrong result, and `NotAsked` if the device refuses a sample or no
    sample is usable. An entry counts as refused if its first usable sample is refused.
    """
    asked, refused, unusable = 0, dict[int, str](), list[str]()
    for question in questions(name):
        try:
            if isinstance(question, UnusableSample):
                raise question
            asked_now, graph = question.traced(rig.table)
            rig.require(graph)
            _compare(asked_now, rig.results(rig.device.compile(graph), *asked_now.tensors))
        except UnusableSample as reason:
            unusable.append(str(reason))
            if len(unusable) == PATIENCE and not asked:
                break
            continue
        except NotAsked as reason:
            refused[asked] = str(reason).removeprefix("refused: ")
        asked += 1
        if asked == samples:
            break
    if not asked:
        raise NotAsked(f"not asked: {unusable[0] if unusable else 'it has no samples'}")
    if 0 in refused:
        raise NotAsked(f"refused: {refused[0]}")
    if refused:
        why = next(iter(refused.values()))
        raise NotAsked(f"runs, but the device refuses {len(refused)} of {asked} samples: {why}")


def _compare(question: Question, actual: list[Array]) -> None:
    terms = max([tensor.numel() for tensor in question.tensors], default=1) or 1
    results = zip(actual, question.wide, question.near, strict=True)
    for index, (array, wide, near) in enumerate(results):
        limit = case_tolerance(wide, eps_of(near.dtype.name), terms)
        if near.dtype.kind == "f":  # torch's own error is large for ill-conditioned functions
            if near.shape != wide.shape:
                raise BrokenRule(f"torch's shape is {near.shape}, but {wide.shape} in float64")
            limit = max(limit, ILL_CONDITIONED * largest_of(errors_of(near, wide)))
        place = index - question.values
        what = f"result {index}" if place < 0 else f"gradient {place}"
        compare(array, wide, limit, f"{what} of inputs {forms_of(question.tensors)}")


@cache
def add_checks() -> None:
    """Add a check per entry of the database, or one check that is skipped without torch's tests."""
    try:
        names = list(entries())
    except ImportError as error:
        CHECKS.append(Check("database/all", Level.FULL, "", "", partial(_missing, str(error))))
        return
    for name in names:
        CHECKS.append(
            Check(
                f"database/{name}",
                Level.FULL,
                "an operator that `supports` accepts computes what torch does, at the samples "
                "of torch's own operator database and in their gradients",
                "the kernel of the operator, or of an operator in its decomposition",
                partial(check_entry, name),
                "torch's database",
            )
        )


def _missing(reason: str, rig: Rig) -> None:
    cure = "pip install 'hetpipe[conformance]'"
    raise NotAsked(f"torch's operator database cannot be imported: {reason}; {cure}")
