"""PipeDream: plans of its published optimizer on its published profiles."""

from __future__ import annotations

from pathlib import Path

from hetpipe.cost.pipedream_profile import read_profile
from hetpipe.papers.reproduced.table import Figure, expected
from hetpipe.plan.planners.pipedream import Level, data_parallel_s, plan_pipedream


def plans(data: Path) -> tuple[str, list[Figure]]:
    """Return the stages' replicas and a mini-batch's time, by the rule of the published code."""
    rows = []
    for entry in expected(data, "pipedream")["flat"]:
        profile = read_profile(data / "profiles" / "pipedream" / f"{entry['profile']}.txt")
        chain = profile.without_inputs().chain()
        levels = [Level(entry["workers"], entry["bandwidth_Bps"])]
        plan = plan_pipedream(chain, levels, "published-code")
        replicas = [stage.replicas for stage in plan.stages]
        note = "the same plan" if replicas == entry["plan"] else "another plan"
        text = plan_pipedream(chain, levels, "text")
        by_text = [stage.replicas for stage in text.stages]
        if by_text != replicas:
            note += f"; by the paper's text {_stages(by_text)}"
        parallel_ms = 1e3 * data_parallel_s(chain, levels, "published-code")
        rows.append(
            Figure(
                f"{entry['profile']}, {entry['workers']} workers, "
                f"{entry['bandwidth_Bps'] / 1e9:g} GB/s",
                f"{_stages(entry['plan'])}, {entry['time_ms']:.2f} ms",
                f"{_stages(replicas)}, {1e3 * plan.bottleneck_s:.2f} ms "
                f"(data parallel {parallel_ms:.2f})",
                note,
            )
        )
    return "Plans and times of a mini-batch, published optimizer", rows


def _stages(replicas: list[int]) -> str:
    return "-".join(map(str, replicas)) if len(replicas) > 1 else f"data parallel on {replicas[0]}"


TABLES = {"plans": plans}
