"""Child process whose forks run kernels, each on one device; a fork may crash or hang.

A fork sends {"begins": CASE} at the beginning of each run of a case, and the results of the case
after its last run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.check.difference import difference, eps_of, errors_of, largest_of, tolerance
from hetpipe.child import Parent
from hetpipe.errors import BackendError
from hetpipe.records import read_text
from hetpipe.sdk.formats.kernelspec import KernelSpec, Tolerance, read_spec
from hetpipe.sdk.host.references import load_reference
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.kernels import (
    Array,
    DeviceLacksError,
    Flaw,
    KernelCall,
    KernelFaultError,
    KernelRunner,
)
from hetpipe.workbench.case import POISONS, Run, call_of, expected, sizes_of


def main() -> None:
    """Run each list of cases from the parent in a fork."""
    parent = Parent()
    parent.run_forks(lambda *arguments: run_cases(parent.send, *arguments))


def run_cases(
    send: Callable[[dict[str, Any]], None], reference: str, device_id: str, source_path: str,
    spec_path: str, function: str, seed: str, cases: str,
) -> None:  # fmt: skip
    """Run the cases one after the other, and send their results.

    `cases` has their numbers, and the values of macros that replace the specification's, as JSON.
    """
    load_reference(reference)
    chosen, path = json.loads(cases), Path(source_path)
    spec = replace(read_spec(Path(spec_path)), define=chosen["define"])
    runner = get_backend(device_id.partition(":")[0]).kernel_runner()
    assert runner is not None, "the parent has asked"
    source = read_text(path, BackendError)
    bench = _Bench(runner, device_id, spec, Path(spec_path).parent, send)
    for number in chosen["numbers"]:
        try:
            result = bench.case(
                number,
                lambda run, number=number: call_of(  # type: ignore[misc]
                    spec, number, path, source, function, int(seed), run
                ),
            )
        except DeviceLacksError as error:
            result = {"flaws": [], "ulp": {}, "skipped": str(error)}
        except BackendError as error:
            result = {"error": str(error)}
        send({"case": number, **result})


class _Bench:
    """A device with a specification: runs a case several times and judges each run."""

    def __init__(
        self, runner: KernelRunner, device_id: str, spec: KernelSpec, folder: Path,
        send: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._runner, self._device_id = runner, device_id
        self._spec, self._folder, self._send = spec, folder, send

    def case(self, number: int, call_for: Callable[[Run], KernelCall]) -> dict[str, Any]:
        """Run a case; return its flaws, its largest errors by output, and notes.

        The runs with other values and then with other sizes follow only while no run has flaws.
        """
        notes: list[str] = []
        units, shares = dict[str, float](), dict[str, float]()
        references: dict[str, list[Array]] = {name: [] for name in self._spec.outputs}
        flaws: list[Flaw] = []
        for run in (Run.LISTED, Run.VALUES, Run.SIZES):
            sizes = sizes_of(self._spec, number, run)
            if flaws or (run == Run.SIZES and sizes == self._spec.cases[number]):
                break
            self._send({"begins": number})
            try:
                call = call_for(run)
                right = expected(self._spec, sizes, call, self._folder)
            except BackendError as error:
                if run == Run.LISTED:
                    raise BackendError(f"case {number}: {error}") from error
                notes.append(f"{_words(run, sizes)} the kernel is not tried: {error}")
                continue
            again = call_for(Run.AGAIN) if run == Run.LISTED else None
            try:
                found, differences = self._judged(call, right, sizes, again)
            except KernelFaultError as error:
                found, differences = [error.flaw], {}
            flaws += [self._in_run(flaw, run, sizes) for flaw in found]
            for name, each in differences.items():
                units[name] = max(units.get(name, 0.0), each.ulp)
                shares[name] = max(shares.get(name, 0.0), each.share)
            for name in self._spec.outputs:
                references[name].append(right[name])
        notes += filter(None, (_constant(name, each) for name, each in references.items()))
        return {
            "flaws": [asdict(flaw) for flaw in flaws], "ulp": units, "share": shares,
            "notes": notes,
        }  # fmt: skip

    def _judged(
        self, call: KernelCall, right: Mapping[str, Array], sizes: Mapping[str, int],
        again: KernelCall | None,
    ) -> tuple[list[Flaw], dict[str, OutputError]]:  # fmt: skip
        """Return a run's flaws and errors by output; `again` is the launch with other poison."""
        spec = self._spec
        after, seen = self._runner.run(self._device_id, call)
        first = {name: after[name] for name in spec.outputs}
        flaws = [*seen, *self._overwritten(call, after)]
        if again is not None and not self._runner.checks(self._device_id):
            flaws += _unsteady(spec, call, first, self._runner.run(self._device_id, again)[0])
        differences = {}
        for name, actual in first.items():
            tolerance = spec.tolerance.get(name, Tolerance())
            terms = tolerance.terms.value(sizes)
            found = differences[name] = output_error(actual, right[name], tolerance, terms)
            if found.wrong and not any(flaw.kind == "not written" for flaw in flaws):
                line = self._line(call, name)
                flaws.append(Flaw("wrong result", call.function, f"{name}: {found.text}", line))
        return flaws, differences

    def _overwritten(self, call: KernelCall, after: Mapping[str, Array]) -> Iterator[Flaw]:
        """Yield a flaw for each input that the kernel changed, unless it is also an output."""
        for name in call.inputs:
            if name in call.outputs or name not in after:
                continue
            before = call.arguments[name]
            assert isinstance(before, np.ndarray), "an input is a tensor"
            differs = _differing(before, after[name])
            if differs.any():
                at = tuple(int(i) for i in np.unravel_index(np.argmax(differs), before.shape))
                text = (
                    f"element {list(at)} of {name} was {before[at]:.8g} and is "
                    f"{after[name][at]:.8g} after the run; {int(differs.sum())} of {before.size} "
                    f"elements changed; if they should, write output = true in [argument.{name}]"
                )
                yield Flaw("overwrites an input", call.function, text, self._line(call, name))

    def _line(self, call: KernelCall, name: str) -> int | None:
        return self._runner.line_that_writes(call.source, call.function, name)

    def _in_run(self, flaw: Flaw, run: Run, sizes: Mapping[str, int]) -> Flaw:
        """Add the run to a flaw's text, and the key of the specification that excludes the run."""
        if run == Run.LISTED:
            return flaw
        text = f"{_words(run, sizes)} {flaw.text}; {_CURES[run]}"
        return Flaw(flaw.kind, flaw.kernel, text, flaw.line)


@dataclass(frozen=True)
class OutputError:
    """The largest errors of an output, in units in the last place and as shares of the limit.

    `wrong` counts the elements whose error exceeds the limit; `text` describes the worst element.
    """

    ulp: float
    share: float
    wrong: int
    text: str = ""


def output_error(actual: Array, reference: Array, allowed: Tolerance, terms: int) -> OutputError:
    """Compare an output with its float64 reference."""
    if actual.size == 0:
        return OutputError(0.0, 0.0, 0)
    if actual.dtype.kind != "f":
        found = difference(actual, reference.astype(actual.dtype), 0.0)
        error = math.inf if found.wrong else 0.0
        return OutputError(error, error, found.wrong, found.text)
    right = reference.astype(np.float64)
    errors = errors_of(actual, right)
    with np.errstate(all="ignore"):
        rounded = right.astype(actual.dtype)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        ulps = np.where(
            np.isfinite(unit) & (unit > 0), errors / unit, np.where(errors, math.inf, 0)
        )
        words, limits = "", np.zeros_like(right)
        if allowed.error == "ulp":
            words = f"{allowed.units:g} ulp"
            limits = np.where(np.isfinite(unit), allowed.units * unit, 0.0)
        elif allowed.error == "sum":  # values beyond the dtype's range must not widen the limit
            largest = largest_of(np.where(np.isfinite(rounded), right, np.nan))
            limits += tolerance(largest, eps_of(actual.dtype.name), terms)
        shares = np.where(errors == 0, 0.0, errors / limits)
    found = difference(actual, right, limits, words)
    return OutputError(float(ulps.max()), float(shares.max()), found.wrong, found.text)


_CURES = {
    Run.VALUES: "if such values never occur, write scale = 1 in the argument",
    Run.SIZES: "if such a size never occurs, write its name into fixed",
}


def _words(run: Run, sizes: Mapping[str, int]) -> str:
    if run == Run.VALUES:
        return "with other values"
    return "with " + ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _constant(name: str, references: Sequence[Array]) -> str | None:
    """Return a warning if the expected output is the same number in all elements of all runs."""
    values = np.concatenate([np.zeros(0), *(each.reshape(-1) for each in references)])
    if values.size < 2 or (values != values[0]).any():
        return None
    return (
        f"{name} should be {values[0]:.8g} in every element: a kernel that writes this number "
        "passes; give the kernel's inputs other values"
    )


def _differing(one: Array, other: Array) -> Array:
    """Return a mask of the elements whose bytes differ."""
    if not one.size:
        return np.zeros(one.shape, np.bool_)
    halves = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other)]
    differs = (halves[0] != halves[1]).reshape(one.size, -1).any(1)
    return np.asarray(differs.reshape(one.shape))


def _unsteady(
    spec: KernelSpec, call: KernelCall, first: dict[str, Array], again: dict[str, Array]
) -> list[Flaw]:
    """Return flaws for outputs that differ between two runs: unwritten or random elements."""
    flaws = []
    for name, array in first.items():
        differs = _differing(array, again[name]).reshape(-1)
        if not differs.any():
            continue
        at = int(np.argmax(differs))
        place = [int(i) for i in np.unravel_index(at, array.shape)]
        kept = all(
            (run.reshape(-1)[at : at + 1].view(np.uint8) == poison).all()
            for run, poison in zip((array, again[name]), POISONS, strict=True)
        )
        count = f"{int(differs.sum())} of {array.size} elements"
        if kept and not spec.argument[name].is_input:
            text = f"the kernel does not write element {place} of {name}; {count}"
            flaws.append(Flaw("not written", call.function, text))
        else:
            text = f"element {place} of {name} differs between two runs; {count}"
            flaws.append(Flaw("not deterministic", call.function, text))
    return flaws


if __name__ == "__main__":
    main()
