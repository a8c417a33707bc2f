"""The benchmark's tables and closing lines, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hetpipe.bench.rows import PipelineRow
from hetpipe.report.tables import make_table
from hetpipe.report.units import format_rate, format_s

if TYPE_CHECKING:
    from hetpipe.bench.bench import Outcome
    from hetpipe.bench.rows import Row

TORCH_BAR = 0.97  # the engine on one device has to keep this share of plain torch's rate


def product_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    """Matrix products in GFLOP/s, median and spread, one core each."""
    columns = (
        "ours", "min .. max", "its ceiling", "torch.mm", "oneDNN", "of ceiling", "times torch.mm",
    )  # fmt: skip
    table = make_table("Matrix products, float32, one core, GFLOP/s", ("", "n", *columns), columns)
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
    """One line per row: median rate, spread, steps predicted and measured, losses."""
    setting = outcome.setting
    numbers = ("M", "samples/s", "min .. max", "step", "predicted", "error", "loss against torch")
    table = make_table(
        f"{setting.name}: mini-batches of {outcome.task.mini_batch}, {setting.rounds} rounds of "
        f"{setting.steps} steps, seed {setting.seed}",
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
    """What follows from the rows."""
    plan = outcome.balanced.plan
    efficiency = outcome.efficiency
    lines = [
        f"devices alone, summed: {format_rate(outcome.ideal)}; balanced pipeline: "
        f"{format_rate(outcome.balanced.rate)} = {efficiency:.1%} of it ({plan.label})",
        f"fill limit M/(M+N-1) with M = {plan.microbatches}, N = {len(plan.stages)}: "
        f"{plan.fill_limit:.1%}; efficiency over fill limit: {efficiency / plan.fill_limit:.1%}",
        f"balanced over even split: {outcome.balanced.rate / outcome.even.rate:.2f}, over the best "
        f"split that ignores speeds: {outcome.balanced.rate / outcome.blind.rate:.2f}",
    ]
    if outcome.over_peer is None:
        lines.append(f"no row of torch.distributed.pipelining: {outcome.without_peer}")
    else:
        lines.append(
            f"balanced over the peer, torch.distributed.pipelining: {outcome.over_peer:.2f}"
        )
    for member, ratio in outcome.over_plain().items():
        lines.append(
            f"{member} alone over plain torch with as many threads: {ratio:.3f}"
            f" (for torch itself the bar is {TORCH_BAR})"
        )
    return lines


def _against_plan(row: Row) -> tuple[str, str, str]:
    if not isinstance(row, PipelineRow):
        return "", "", ""
    measured_s = row.task.mini_batch / row.rate
    return (
        format_s(row.plan.step_s),
        f"{row.plan.step_s / measured_s - 1:+.1%}",
        f"{row.difference:.0e}",
    )
