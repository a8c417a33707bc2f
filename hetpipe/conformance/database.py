"""Checks with torch's operator database: its samples, forward and backward, against float64."""

from __future__ import annotations

from functools import cache, partial

from hetpipe.check.difference import Array, case_tolerance, eps_of, errors_of, largest_of
from hetpipe.conformance.check import CHECKS, Check, Level
from hetpipe.conformance.outcomes import BrokenRule, NotAsked
from hetpipe.conformance.rig import Rig, compare
from hetpipe.conformance.samples import Question, Unasked, entries, questions

SAMPLES = 3
"""Samples that a device runs per entry: the first ones that torch can trace."""
PATIENCE = 4
"""Number of untraceable samples after which an entry without a traced sample is abandoned."""
ILL_CONDITIONED = 8
"""Allowed error as a multiple of torch's float32 error, if larger than the usual tolerance."""


def check_entry(name: str, rig: Rig, samples: int = SAMPLES) -> None:
    """Run the first `samples` traceable samples of an entry, forward and with gradients.

    Raises `BrokenRule` for a wrong result, and `NotAsked` if the device refuses a sample. An entry
    counts as refused if its first sample is refused.
    """
    asked, refused, unasked = 0, dict[int, str](), list[str]()
    for question in questions(name):
        try:
            if isinstance(question, Unasked):
                raise question
            asked_now, graph = question.traced(rig.table)
            rig.require(graph)
            _compare(asked_now, rig.results(rig.device.compile(graph), *asked_now.tensors))
        except Unasked as reason:
            unasked.append(str(reason))
            if len(unasked) == PATIENCE and not asked:
                break
            continue
        except NotAsked as reason:
            refused[asked] = str(reason).removeprefix("refused: ")
        asked += 1
        if asked == samples:
            break
    if not asked:
        raise NotAsked(f"not asked: {unasked[0] if unasked else 'it has no samples'}")
    if 0 in refused:
        raise NotAsked(f"refused: {refused[0]}")
    if refused:
        why = next(iter(refused.values()))
        raise NotAsked(f"runs, but the device refuses {len(refused)} of {asked} samples: {why}")


def _compare(question: Question, actual: list[Array]) -> None:
    tensors = question.tensors
    forms = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
    terms = max([tensor.numel() for tensor in tensors], default=1) or 1
    results = zip(actual, question.wide, question.near, strict=True)
    for index, (array, wide, near) in enumerate(results):
        limit = case_tolerance(wide, eps_of(near.dtype.name), terms)
        if near.dtype.kind == "f":  # torch's error is also large for ill-conditioned functions
            limit = max(limit, ILL_CONDITIONED * _worst(near, wide))
        place = index - question.values
        what = f"result {index}" if place < 0 else f"gradient {place}"
        compare(array, wide, limit, f"{what} of inputs {forms}")


def _worst(near: Array, wide: Array) -> float:
    if near.shape != wide.shape:
        raise BrokenRule(f"torch itself gives {near.shape}, in float64 {wide.shape}")
    return largest_of(errors_of(near, wide))


@cache
def add_checks() -> None:
    """Add a check per entry of the database, or one skipped check if torch's tests are missing."""
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
