"""The benchmark's tables for people, and its conclusions in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from hetpipe.bench.rows import PipelineRow
from hetpipe.report.tables import Table
from hetpipe.simulate.outcome import occupation
from hetpipe.words import format_rate, format_s

if TYPE_CHECKING:
    from hetpipe.bench.outcome import Outcome
    from hetpipe.bench.rows import Row

SAME = 0.03  # relative difference of rates that counts as noise
TORCH_BAR = 0.97  # lowest acceptable rate on one device, over plain torch's rate


def product_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of matrix products on one core in GFLOP/s: median, lowest, highest."""
    columns = (
        "ours", "min .. max", "its ceiling", "torch.mm", "oneDNN", "of ceiling", "times torch.mm",
    )  # fmt: skip
    table = Table("Matrix products, float32, one core, GFLOP/s", ("", "n", *columns), columns, 2)
    for each in figures:
        ours, onednn = each["ours_gflops"], each["onednn_gflops"]
        table.add_row(
            each["device_id"],
            str(each["n"]),
            f"{ours['median']:.0f}",
            f"{ours['lowest']:.0f} .. {ours['highest']:.0f}",
            f"{each['ceiling_gflops']['median']:.0f}",
            f"{each['torch_mm_gflops']['median']:.0f}",
            f"{onednn['median']:.0f}" if onednn else "-",
            f"{each['of_ceiling']:.1%}",
            f"{each['of_torch']:.2f}",
        )
    return table


def outcome_table(outcome: Outcome) -> Table:
    """Return a table of the rows: rates, predicted and measured steps, errors of losses."""
    setting = outcome.setting
    numbers = (
        "M", "samples/s", "min .. max", "step", "predicted, raw", "corrected for drift", "80 % in",
        "loss against torch",
    )  # fmt: skip
    table = Table(
        f"{setting.name}: mini-batches of {outcome.task.mini_batch}, {setting.rounds} rounds of "
        f"{outcome.task.pace.timed} steps, losses of {outcome.task.pace.checked}, "
        f"seed {setting.seed}",
        ("", "times are", *numbers),
        numbers,
    )
    for row in outcome.rows:
        table.add_row(
            row.name,
            row.label,
            str(row.microbatches),
            format_rate(row.rate),
            f"{min(row.rates):.0f} .. {max(row.rates):.0f}",
            format_s(outcome.task.mini_batch / row.rate),
            *_against_plan(row),
        )
    return table


def outcome_lines(outcome: Outcome) -> list[str]:
    """Return lines of text with the conclusions from the rows."""
    plan = outcome.balanced.plan
    efficiency = outcome.efficiency
    lines = [
        f"sum of the devices alone, one after the other: {format_rate(outcome.ideal)}; balanced "
        f"pipeline: {format_rate(outcome.balanced.rate)} = {efficiency:.1%} of it ({plan.label})",
        f"fill limit M/(M+N-1) with M = {plan.microbatches}, N = {len(plan.stages)}: "
        f"{plan.fill_limit:.1%}; efficiency over fill limit: {efficiency / plan.fill_limit:.1%}",
        f"balanced over even split: {outcome.balanced.rate / outcome.even.rate:.2f}, over the best "
        f"split that ignores speeds: {outcome.balanced.rate / outcome.blind.rate:.2f}",
    ]
    if outcome.at_once is not None:
        shares = [
            f"{row.name} {row.rate / outcome.sum_rate:.1%}"
            for row in (outcome.balanced, *outcome.streams)
        ]
        lines.append(
            f"sum of the devices alone, all at once: {format_rate(outcome.sum_rate)}; shares of "
            f"this sum: {', '.join(shares)}"
        )
    lines += [
        f"{row.name}, last step on {len(row.plan.all_devices)} devices ({row.label}): "
        f"{occupation(row.pipe.timeline)}"
        for row in dict.fromkeys((outcome.balanced, *outcome.streams))
    ]
    best = max(
        (*outcome.alone, outcome.even, outcome.blind, *outcome.together), key=lambda row: row.rate
    )
    lines.append(
        f"auto, the default plan: {format_rate(outcome.auto.rate)} = "
        f"{outcome.auto.rate / best.rate:.1%} of the best synchronous row, {best.name}"
    )
    if outcome.over_peer is None:
        lines.append(f"no row of torch.distributed.pipelining: {outcome.without_peer}")
    else:
        lines.append(
            f"balanced over the peer, torch.distributed.pipelining: {outcome.over_peer:.2f}"
        )
    share = outcome.twice_efficiency
    if outcome.twice is not None and share is not None:
        limit = outcome.twice.plan.fill_limit
        lines.append(
            f"{outcome.twice.name}: {share:.1%} of twice the device's rate alone, "
            f"{share / limit:.1%} of the fill limit; over plain torch on all cores: "
            f"{outcome.over_all_cores(outcome.twice):.2f}"
        )
    if not outcome.streams:
        lines.append(f"no asynchronous row: {outcome.without_streams}")
    if outcome.parallel is None:
        lines.append(f"no data-parallel row: {outcome.without_parallel}")
    else:
        lines.append(
            f"data parallel, the whole model on each device: "
            f"{outcome.parallel.rate / outcome.ideal:.1%} of the devices' sum; over plain torch on "
            f"all cores: {outcome.over_all_cores(outcome.parallel):.2f}"
        )
    if outcome.twice_parallel is not None:
        lines.append(
            f"{outcome.twice_parallel.name}: over plain torch on all cores: "
            f"{outcome.over_all_cores(outcome.twice_parallel):.2f}"
        )
    if outcome.linked is not None:
        aware, blind = outcome.linked.aware, outcome.linked.blind
        lines.append(
            f"over the slow link (emulated): planned for it {format_rate(aware.rate)}, planned as "
            f"if it were free {format_rate(blind.rate)}: {aware.rate / blind.rate:.2f} times"
            + (" (the same plan)" if aware is blind else "")
        )
        under_way_s, hidden_s = aware.pipe.timeline.under_way_s()
        lines.append(
            f"messages of the plan for the slow link were under way for {format_s(under_way_s)} in "
            f"its last step; for {hidden_s / under_way_s:.0%} of this time the receiver computed"
        )
    lines.append(prediction_line([row for row in outcome.rows if isinstance(row, PipelineRow)]))
    for member, ratio in outcome.over_plain().items():
        lines.append(
            f"{member} alone over plain torch with as many threads: {ratio:.3f}"
            f" (the backend of torch should reach {TORCH_BAR})"
        )
    return lines


def summary_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one line per setting: samples per second without and with hetpipe."""
    columns = (
        "torch, 1 core", "torch, all cores", "torch's pipeline", "hetpipe: best device alone",
        "all devices: pipeline", "data parallel", "best over torch, all cores",
        "two of one device: best", "over torch, all cores",
    )  # fmt: skip
    table = Table(
        "Samples per second, medians: higher is better", ("", *columns, "times are"), columns
    )
    for outcome in outcomes:
        plain = sorted(outcome.plain, key=lambda row: row.threads)
        best = max(outcome.alone, key=lambda row: row.rate)
        cells = ["-", "-"]
        if outcome.twins:
            twins = max(outcome.twins, key=lambda row: row.rate)
            cells = [f"{twins.rate:.0f}", f"{outcome.over_all_cores(twins):.2f}"]
        together = max(outcome.together, key=lambda row: row.rate)
        table.add_row(
            outcome.setting.name,
            f"{plain[0].rate:.0f}",
            f"{plain[-1].rate:.0f}",
            "-" if outcome.peer is None else f"{outcome.peer.rate:.0f}",
            f"{best.rate:.0f}",
            f"{outcome.balanced.rate:.0f}",
            "-" if outcome.parallel is None else f"{outcome.parallel.rate:.0f}",
            f"{outcome.over_all_cores(together):.2f}",
            *cells,
            outcome.balanced.label,
        )
    return table


def closing(outcomes: Sequence[Outcome]) -> list[str]:
    """Return advice for each measured workload on this machine, and a general reason."""
    lines = []
    for outcome in outcomes:
        if outcome.balanced.label != "measured":
            continue
        best = max((*outcome.together, *outcome.twins), key=lambda row: row.rate)
        ratio = outcome.over_all_cores(best)
        where = " + ".join(name for stage in best.plan.stages for name in stage.devices)
        pipeline = len(best.plan.stages) > 1
        how = f"{where} {'as a pipeline' if pipeline else 'each with the whole model'}"
        if ratio > 1 + SAME:
            what = "a pipeline" if pipeline else "data parallelism"
            verdict = f"{what} pays: {how} train {ratio:.2f} times as fast as"
        elif ratio < 1 - SAME:
            verdict = f"use plain torch: {how} reach {ratio:.2f} of the speed of"
        else:
            verdict = f"it makes no difference: {how} are as fast as"
        lines.append(f"{outcome.setting.model}: {verdict} plain torch on all cores.")
    lines.append(
        "A pipeline pays where several devices together are faster than the one that torch would "
        "use: with different devices, with a device whose kernels are quicker than torch's, or "
        "with a model too large for one memory. Where torch uses all cores of a processor well, "
        "plain torch is better, because a pipeline must fill and empty in every step."
    )
    return lines


def _against_plan(row: Row) -> tuple[str, str, str, str]:
    if not isinstance(row, PipelineRow):
        return "", "", "", ""
    raw = f"{format_s(row.plan.step_s)} ({row.plan.step_s / row.measured_s - 1:+.1%})"
    correction = row.correction
    interval_s = correction.interval_s
    return (
        raw,
        f"{format_s(correction.corrected_s)} ({correction.corrected_s / row.measured_s - 1:+.1%})",
        "" if interval_s is None else " .. ".join(map(format_s, interval_s)),
        "older weights" if row.difference is None else f"{row.difference:.0e}",
    )


def prediction_line(rows: Sequence[PipelineRow]) -> str:
    """Return a line with the errors of predicted steps, raw and corrected, over these rows."""
    raw = [abs(row.plan.step_s / row.measured_s - 1) for row in rows]
    pairs = [(row.measured_s, row.correction) for row in rows]
    corrected = [abs(each.corrected_s / step_s - 1) for step_s, each in pairs]
    spans = [(step_s, each.interval_s) for step_s, each in pairs]
    within = [span[0] <= step_s <= span[1] for step_s, span in spans if span is not None]
    return (
        f"predicted steps of {len(rows)} plans: raw {_errors(raw)}, corrected for drift "
        f"{_errors(corrected)}; {sum(within)} of {len(within)} measured steps lie in the interval "
        "of their prediction"
    )


def _errors(errors: Sequence[float]) -> str:
    return f"{median(errors):.1%} off in the median and {max(errors):.1%} at worst"
