"""Trials of a kernel on every device that runs it, in processes that may crash or hang."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import queue
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetpipe.child import Child, ChildEnded, ChildLate
from hetpipe.errors import BackendError
from hetpipe.records import read_text
from hetpipe.sdk.formats.kernelspec import KernelSpec, read_spec
from hetpipe.sdk.host.references import backend_reference
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.kernels import Flaw, KernelRunner
from hetpipe.words import choices, near, words
from hetpipe.workbench.case import Run, call_of
from hetpipe.workbench.missing import check_arguments, lacking
from hetpipe.workbench.runners import devices_with_kernels, runner_of

START_LIMIT_S = 60.0
"""Longest time from a process's start to its first case, and between cases."""
CHECKED_ITEMS = 4096
"""Most work-items of a case under a checker; if all cases are larger, the smallest one runs."""


@dataclass(frozen=True)
class Outcome:
    """One case on one device: its flaws, and the largest error of each output in ulp."""

    device_id: str
    case: int
    sizes: Mapping[str, int]
    flaws: tuple[Flaw, ...]
    ulp: Mapping[str, float]
    share: Mapping[str, float] = field(default_factory=dict)
    """The largest error of each output as a share of the allowed error."""
    notes: tuple[str, ...] = ()
    """Warnings about impossible runs and about expectations that prove little."""
    skipped: str = ""
    """The reason why the device cannot run the kernel, if it lacks a feature."""


@dataclass(frozen=True)
class Trial:
    """A kernel under test: the `function` of a source, and its specification."""

    source: Path
    spec_path: Path
    spec: KernelSpec
    function: str
    seed: int = 0

    def again(self, device_id: str, case: int) -> str:
        """Return the command that repeats a case."""
        function = f" --function {self.function}" if self.spec.function != self.function else ""
        return (
            f"hetpipe kernels test {self.source} --spec {self.spec_path}{function} "
            f"--device {device_id} --case {case} --seed {self.seed}"
        )

    def texts(self, outcome: Outcome) -> list[str]:
        """Return a text per flaw: kind, line, kernel, device, sizes, description and command."""
        sizes = ", ".join(f"{name} = {size}" for name, size in outcome.sizes.items())
        again = self.again(outcome.device_id, outcome.case)
        return [
            f"{flaw.kind}  {self.source}{'' if flaw.line is None else f':{flaw.line}'}  "
            f"{flaw.kernel} on {outcome.device_id}, case {outcome.case} ({sizes})\n"
            f"    {flaw.text}\n    {again}"
            for flaw in outcome.flaws
        ]


def trial_of(source: Path, spec_path: Path, function: str = "", seed: int = 0) -> Trial:
    """Read a source and its specification; without a function's name, take the only kernel.

    Raises `BackendError` if a file is missing or wrong, if the source lacks the kernel, or if the
    kernel's parameters are not the arguments of the specification.
    """
    runner = runner_of(source)
    text = read_text(source, BackendError)
    names = runner.functions(text)
    if not spec_path.exists():
        raise BackendError(lacking(source, spec_path, runner, text))
    spec = read_spec(spec_path)
    chosen = function or spec.function
    alone = [name for name in names if name not in spec.beside]
    if not chosen and len(alone) == 1:
        chosen = alone[0]
    if chosen not in names:
        wanted = f"no kernel {chosen!r}" if chosen else f"{len(names)} kernels"
        raise BackendError(
            f"{source} has {wanted}; write function = NAME in {spec_path} "
            f"({near(chosen, names)}kernels: {words(names)})"
        )
    if unknown := [name for name in spec.beside if name not in names or name == chosen]:
        raise BackendError(
            f"{spec_path}: `beside` names {words(unknown)}; it may name the kernels of {source} "
            f"except {chosen}, and the kernels are {words(names)}"
        )
    check_arguments(spec, spec_path, runner, text, [chosen, *spec.beside])
    return Trial(source, spec_path, spec, chosen, seed)


def devices_for(source: Path, named: Sequence[str] = ()) -> list[str]:
    """Return the ids of all devices that run files with the source's suffix, or the `named` ids.

    Raises `BackendError` if a named device does not run such files.
    """
    found = [info.id for info in devices_with_kernels(source.suffix)]
    if unknown := [device_id for device_id in named if device_id not in found]:
        there = choices(unknown[0], found)
        raise BackendError(f"no device {unknown[0]!r} runs {source.suffix} files; {there}")
    return list(named) or found


def outcomes(
    trial: Trial, device_ids: Sequence[str], cases: Sequence[int] = ()
) -> Iterator[Outcome]:
    """Yield the outcome of every case on every device, as cases end; devices run in parallel.

    Raises `BackendError` if a case's sizes or reference are wrong.
    """
    results: queue.SimpleQueue[Outcome | BackendError | None] = queue.SimpleQueue()

    def work(device_id: str) -> None:
        try:
            for outcome in _on_device(trial, device_id, cases):
                results.put(outcome)
        except BackendError as error:
            results.put(error)
        finally:
            results.put(None)

    with ThreadPoolExecutor(max(1, min(len(device_ids), os.cpu_count() or 1))) as pool:
        for device_id in device_ids:
            pool.submit(work, device_id)
        left = len(device_ids)
        failure: BackendError | None = None
        while left:
            result = results.get()
            if result is None:
                left -= 1
            elif isinstance(result, BackendError):
                failure = failure or result
            else:
                yield result
    if failure is not None:
        raise failure


def _on_device(trial: Trial, device_id: str, cases: Sequence[int]) -> Iterator[Outcome]:
    runner = get_backend(device_id.partition(":")[0]).kernel_runner()
    assert runner is not None, "devices_for has asked"
    count = len(trial.spec.cases)
    numbers = list(cases) or list(range(count))
    if beyond := [number for number in numbers if not 0 <= number < count]:
        raise BackendError(f"no case {beyond[0]} in {trial.spec_path}; give 0 to {count - 1}")
    if not runner.checks(device_id):
        yield from _run(trial, device_id, numbers, {})
        return
    for number in numbers if cases else _small(trial, numbers):
        outcome = _checked(trial, runner, device_id, number)
        yield outcome
        if _ends_device(outcome):
            return


def _checked(trial: Trial, runner: KernelRunner, device_id: str, number: int) -> Outcome:
    """Run one case per process: a checker names no case, and stops after some hundred findings."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-kernel-") as folder:
        log = Path(folder, "log")
        outcome, *crash = _run(trial, device_id, [number], runner.checker_environment(log))
        found = runner.flaws_of(log.read_text(errors="replace")) if log.exists() else ()
    flaws = [flaw for end in (outcome, *crash) for flaw in end.flaws]
    return replace(outcome, flaws=(*found, *flaws))


def _ends_device(outcome: Outcome) -> bool:
    """Return whether all other cases would have the same flaw, and take as long to show it."""
    return any(flaw.kind in ("hangs", "does not build") for flaw in outcome.flaws)


def _small(trial: Trial, numbers: Sequence[int]) -> list[int]:
    """Return the cases with at most `CHECKED_ITEMS` work-items, or else the smallest case."""
    items = {}
    for number in numbers:
        sizes = trial.spec.cases[number]
        items[number] = 1
        for size in trial.spec.global_size:
            items[number] *= size.value(sizes)
    small = [number for number in numbers if items[number] <= CHECKED_ITEMS]
    return small or [min(numbers, key=items.__getitem__)]


def _run(
    trial: Trial, device_id: str, numbers: Sequence[int], environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Run the cases in a separate process; start a new one after a crash or a hang."""
    left = list(numbers)
    while left:
        done = 0
        for outcome in _process(trial, device_id, left, environment):
            done += 1
            yield outcome
            if _ends_device(outcome):
                return
        left = left[max(done, 1) :]


def _process(
    trial: Trial, device_id: str, numbers: Sequence[int], environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Yield the outcomes of a process, which ends after its last case or with a fault.

    A fault belongs to the first case without an outcome; after the last case, to the last one.
    """
    reference = backend_reference(device_id.partition(":")[0])
    arguments = (
        reference, device_id, trial.source, trial.spec_path, trial.function, trial.seed,
        json.dumps({"define": trial.spec.define, "numbers": list(numbers)}),
    )  # fmt: skip
    child, has_ended = _idle_child(), False
    limit_s, done = START_LIMIT_S, 0
    try:
        child.fork(*arguments, environment=environment)
        while True:
            message = child.receive(limit_s)
            if "begins" in message:
                limit_s = trial.spec.time_limit_s
            elif "error" in message:
                raise BackendError(f"{trial.spec_path}: {message['error']}")
            else:
                yield _outcome(trial, device_id, message)
                done, limit_s = done + 1, START_LIMIT_S
    except ChildLate:
        text = f"did not end within {limit_s:g} s on {device_id}"
        yield _failed(
            trial, device_id, (*numbers, numbers[-1])[done], Flaw("hangs", trial.function, text)
        )
    except ChildEnded as error:
        has_ended = True
        if error.code != 0 or done < len(numbers):
            last = error.last_line or "no output"
            text = f"ended the process with {error.how} on {device_id}: {last}"
            yield _failed(
                trial,
                device_id,
                (*numbers, numbers[-1])[done],
                Flaw("crashes", trial.function, text),
            )
    finally:
        if has_ended and child.is_alive:
            _idle.append(child)
        else:
            child.close()


_idle: list[Child] = []
"""Children that have imported every module of a trial, but run no trial now."""


def _idle_child() -> Child:
    while True:
        try:
            child = _idle.pop()
        except IndexError:
            return Child("hetpipe.workbench.child")
        if child.is_alive:
            return child
        child.close()


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


def _outcome(trial: Trial, device_id: str, message: Mapping[str, Any]) -> Outcome:
    flaws = tuple(Flaw(**flaw) for flaw in message["flaws"])
    number = message["case"]
    return Outcome(
        device_id, number, trial.spec.cases[number], flaws, message["ulp"],
        message.get("share", {}), tuple(message.get("notes", ())), message.get("skipped", ""),
    )  # fmt: skip


def _failed(trial: Trial, device_id: str, number: int, flaw: Flaw) -> Outcome:
    return Outcome(device_id, number, trial.spec.cases[number], (flaw,), {})


def digest(trial: Trial) -> str:
    """Return a hash of a trial's files. Raises `BackendError` for a missing one."""
    files = [trial.source, trial.spec_path]
    if trial.spec.reference:
        files.append(trial.spec_path.parent / trial.spec.reference.rpartition(":")[0])
    texts = [read_text(file, BackendError) for file in files]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def check_sizes(trial: Trial) -> None:
    """Raise `BackendError` for a case with invalid sizes, before any case runs."""
    source = read_text(trial.source, BackendError)
    for number in range(len(trial.spec.cases)):
        call_of(trial.spec, number, trial.source, source, trial.function, trial.seed, Run.LISTED)
