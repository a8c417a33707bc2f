"""Links between host and card, as training uses them, beside plain copies of torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import permutations

import torch

from card.setting import HOST, Setting, Wrong
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.profile.links import measure_links

NBYTES = (4 << 10, 4 << 20, 64 << 20)
ROUNDS = 15


def links(setting: Setting) -> None:
    """Measure all links between the CPU, the card, and a second card if there is one."""
    second = f"{setting.device.rpartition(':')[0]}:1"
    count = torch.accelerator.device_count() if setting.is_card else 0
    devices = [HOST, setting.device, *([second] if count > 1 else [])]
    with Crew.start(Cluster.local(devices=devices)) as crew:
        found, overhead_s = measure_links(crew)
    rows = {
        f"{source} -> {target}": {
            "latency_s": cost.latency_s,
            "bandwidth_Bps": cost.bandwidth_Bps,
            "label": cost.label,
        }
        for (source, target), cost in found.items()
    }
    setting.keep(links=rows, step_overhead_s=overhead_s, torch_copies=_copies(setting, count))
    if len(rows) != len(devices) * (len(devices) - 1):
        raise Wrong(f"{len(rows)} links between {len(devices)} devices")


def _copies(setting: Setting, cards: int) -> dict[str, dict[int, float]]:
    """Return bytes per second of torch's copies by way and size; host memory is pinned."""
    card = torch.device(setting.torch_name)
    places = {"host": torch.device("cpu"), "card": card}
    if cards > 1:
        places["second card"] = torch.device(card.type, 1)
    rates: dict[str, dict[int, float]] = {}
    for source, target in permutations(places, 2):
        rates[f"{source} -> {target}"] = {
            nbytes: nbytes / _copy_s(places[source], places[target], nbytes) for nbytes in NBYTES
        }
    return rates


def _copy_s(source: torch.device, target: torch.device, nbytes: int) -> float:
    accelerators = {each for each in (source, target) if each.type != "cpu"}

    def empty(place: torch.device) -> torch.Tensor:
        pinned = bool(accelerators) and place.type == "cpu"
        return torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=pinned)

    a, b = empty(source), empty(target)

    def copy() -> None:
        b.copy_(a, non_blocking=True)
        for each in accelerators:
            torch.accelerator.synchronize(each)

    return _median_s(copy)


def _median_s(run: Callable[[], None]) -> float:
    times_s = []
    for _ in range(ROUNDS + 2):
        begin_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[2:])
