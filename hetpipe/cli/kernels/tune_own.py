"""The part of `hetpipe kernels tune` that tunes the macros of a user's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetpipe.cli.output import Output
from hetpipe.errors import BackendError
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.workbench.trial import Trial
    from hetpipe.workbench.tuning import Combination


@dataclass(frozen=True)
class Effort:
    """The case to measure (None: the largest), the seconds of a combination, and the rounds."""

    case: int | None
    seconds: float
    rounds: int


def tune_own(
    output: Output, trial: Trial, device_ids: Sequence[str], effort: Effort, keeps: bool
) -> None:
    """Check and measure every combination on every device. Raises `BackendError`."""
    from hetpipe.workbench.runners import runner_of
    from hetpipe.workbench.tuning import keep, largest_case

    count = len(trial.spec.case)
    case = largest_case(trial.spec) if effort.case is None else effort.case
    if not 0 <= case < count:
        raise BackendError(f"no case {case} in {trial.spec_path}; give 0 to {count - 1}")
    chosen = device_ids or _measurable(trial)
    for device_id in chosen:
        if runner_of(trial.source).checks(device_id):
            raise BackendError(
                f"{device_id} checks every access, so its times say nothing about a kernel: name "
                "another device"
            )
    if keeps and len(chosen) > 1:
        raise BackendError(
            f"--keep writes the best values of one device: name one of {', '.join(chosen)} with "
            "--device ID"
        )
    results = {}
    for device_id in chosen:
        tried = _tried(trial, device_id, case, effort)
        best, results[device_id] = _concluded(output, trial, device_id, case, tried)
        if keeps and best is None:
            output.text(f"{trial.spec_path} keeps its values")
        elif keeps and best is not None:
            lines = keep(trial.spec_path, best.values)
            output.text(
                f"write into {trial.spec_path}:\n{lines}" if lines
                else f"{trial.spec_path} has {best} first now; a training uses the first values"
            )  # fmt: skip
    sizes = dict(trial.spec.case[case])
    output.finish({"kernel": trial.function, "case": case, "sizes": sizes, "devices": results})


def _measurable(trial: Trial) -> list[str]:
    """Return the devices that can run the source, without emulated ones."""
    from hetpipe.workbench.trial import devices_for

    found = devices_for(trial.source)
    chosen = [device_id for device_id in found if not _is_emulated(device_id)]
    if not chosen:
        raise BackendError(
            f"only emulated devices run {trial.source}, and their times say nothing about a "
            f"device; name one all the same: --device {found[0]}"
        )
    return chosen


def _is_emulated(device_id: str) -> bool:
    from hetpipe.sdk.host.registry import devices_of

    infos = devices_of(device_id.partition(":")[0])
    return any(info.id == device_id and info.capabilities.emulated for info in infos)


def _tried(trial: Trial, device_id: str, case: int, effort: Effort) -> list[Combination]:
    """Return all combinations, with times if they are right on the device."""
    from hetpipe.workbench.tuning import Combination, combinations, measured, reason_against

    every = combinations(trial.spec)
    with progress_bar() as progress:
        reasons = []
        for number in range(len(every)):
            progress(f"checking {trial.function} on {device_id}", number, len(every))
            reasons.append(reason_against(trial, device_id, number))
        right = [number for number, reason in enumerate(reasons) if not reason]
        if not right:
            raise BackendError(
                f"kernel {trial.function} is right on {device_id} with no combination; "
                f"{Combination(every[0])}: {reasons[0]}"
            )
        progress(f"measuring {trial.function} on {device_id}", 0, 1)
        times = measured(trial, device_id, right, case, effort.seconds, effort.rounds)
    rounds_s = dict(zip(right, times, strict=True))
    return [
        Combination(values, rounds_s.get(number, ()), reasons[number])
        for number, values in enumerate(every)
    ]


def _concluded(
    output: Output, trial: Trial, device_id: str, case: int, tried: Sequence[Combination]
) -> tuple[Combination | None, dict[str, Any]]:
    """Print the table, the excluded combinations and the best. Return the best, and all as JSON.

    The best is None if the lowest median is another's than the first's, but their rounds overlap.
    """
    from hetpipe.profile.clock import spread_of
    from hetpipe.report.tables import Table
    from hetpipe.words import format_s

    right = [each for each in tried if not each.excluded]
    first, lowest = right[0], min(right, key=lambda each: each.median_s)
    best = lowest if lowest is first or lowest.is_faster(first) else None
    sizes = ", ".join(f"{name} = {size}" for name, size in trial.spec.case[case].items())
    label = "emulated" if _is_emulated(device_id) else "measured"
    columns = ("macros", "median", "lowest", "highest", "spread", "speed")
    title = f"{trial.function} on {device_id}, case {case} ({sizes}), one launch ({label})"
    table = Table(title, columns, columns[1:])
    for each in right:
        table.add_row(
            str(each), format_s(each.median_s), format_s(min(each.rounds_s)),
            format_s(max(each.rounds_s)), f"{spread_of(each.rounds_s):.1%}",
            f"{first.median_s / each.median_s:.2f}",
        )  # fmt: skip
    output.console.print(table)
    for each in tried:
        if each.excluded:
            output.text(f"excluded  {each}: {each.excluded}")
    gain = 1.0 if best is None else first.median_s / best.median_s
    if best is first:
        text = f"best: {first}, the first"
    elif best is not None:
        text = f"best: {best}, {gain:.2f} times as fast as {first}, the first ({label})"
    else:
        text = (
            f"none is better than {first}, the first: {lowest} has the lowest median, but rounds "
            f"of the two overlap, so they do not differ beyond the spread ({label})"
        )
    output.text(text)
    rows = [
        {"values": dict(each.values), "rounds_s": list(each.rounds_s),
         "median_s": each.median_s if each.rounds_s else None, "excluded": each.excluded}
        for each in tried
    ]  # fmt: skip
    data = {"label": label, "combinations": rows, "first": dict(first.values)}
    return best, {**data, "best": dict((best or first).values), "gain": gain}
