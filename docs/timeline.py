"""Draws docs/timeline.png: one step of 12 equal layers on two devices, one twice as fast.

Nothing is measured: times per layer are made up, and the simulator says how the step goes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetpipe.report import draw_timelines
from hetpipe.schedule import generate
from hetpipe.simulate import StageTimes, Timeline, Transfer, simulate

LAYERS, MICROBATCHES = 12, 6
FORWARD_S = {"fast": 1e-3, "slow": 2e-3}
"""Seconds of one layer and one micro-batch; a backward takes twice as long."""


def step(how: str, fast_layers: int) -> Timeline:
    """Return a step with `fast_layers` layers on the fast device and the others on the slow one."""
    layers = (fast_layers, LAYERS - fast_layers)
    forward_s = tuple(n * each_s for n, each_s in zip(layers, FORWARD_S.values(), strict=True))
    link = (Transfer(latency_s=0.2e-3, occupancy_s=2e-3),)
    backward_s = tuple(2 * each_s for each_s in forward_s)
    times = StageTimes(forward_s, backward_s, (2e-3, 2e-3), link, link)
    schedule = generate("1f1b", 2, MICROBATCHES, in_flight=(3, 1))
    timeline = simulate(schedule, times, workers=[*FORWARD_S])
    return replace(timeline, label=f"modelled, {how} ({layers[0]} + {layers[1]} layers)")


if __name__ == "__main__":
    steps = [step("split evenly", LAYERS // 2), step("balanced", LAYERS * 2 // 3)]
    title = f"{LAYERS} equal layers on two devices, one twice as fast"
    draw_timelines(Path(__file__).with_suffix(".png"), steps, title)
