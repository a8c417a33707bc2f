"""The operators that a device lacks for a model, by their share of its time.

The share is modelled: that of the operators' seconds on a processor that is only described.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from hetpipe.cost.board import board
from hetpipe.cost.gpu import kernels_s

JUDGE = "desktop-cpu"
"""The board whose modelled seconds weigh the operators."""


@dataclass(frozen=True)
class Lacking:
    """An operator that a device refuses: how often, its share of the model's time, and why."""

    operator: str
    calls: int
    share: float
    reason: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """What a device lacks for one model, the largest share of time first."""

    model: str
    device: str
    calls: int
    lacking: tuple[Lacking, ...]

    @property
    def covered(self) -> float:
        """The share of the model's time in operators that the device has."""
        return 1 - sum(each.share for each in self.lacking)

    def to_json(self) -> dict[str, Any]:
        """A dict that `json` can write."""
        return {
            "model": self.model,
            "device": self.device,
            "calls": self.calls,
            "covered": self.covered,
            "lacking": [vars(each) for each in self.lacking],
        }


def coverage(model: str, device: str, mini_batch: int | None = None) -> Coverage:
    """The operators of a workload's forwards, backwards and updates that a device refuses.

    The model is captured in the operators of the device's backend. Opens the device; runs nothing.
    Raises `HetpipeError` if there is no such model or device.
    """
    from hetpipe.profile.count import counted
    from hetpipe.sdk.graph import operator_name
    from hetpipe.sdk.registry import decompositions_of, open_device
    from hetpipe.study.models import of_model
    from hetpipe.zoo.load import optimizer_of

    there = open_device(device)
    subject, judge = of_model(model, mini_batch), board(JUDGE)
    captured = subject.captured()
    samples = subject.samples
    count = len(captured.layer_graph(samples).layers)
    tables = [decompositions_of(there.info.backend)] * count
    stages = captured.stage_graphs(
        range(1, count), tables, [samples], optimizer_of(subject.workload), extras=()
    )
    calls, total_s = Counter[str](), 0.0
    seconds: dict[str, float] = defaultdict(float)
    reasons: dict[str, str] = {}
    layers: dict[str, dict[str, None]] = {}
    for stage in stages:
        passes = stage.passes[samples]
        programs = [passes.forward, passes.backward, stage.update]
        for program in (program for program in programs if program is not None):
            for node, kernel in counted(program.graph.graph):
                taken_s = kernels_s(judge, [kernel])
                total_s += taken_s
                reason = there.supports(node)
                if reason is not None:
                    name = operator_name(node)
                    seconds[name] += taken_s
                    calls[name] += 1
                    reasons.setdefault(name, reason)
                    layers.setdefault(name, {})[str(node.meta.get("layer", "?"))] = None
            calls[""] += sum(1 for _ in counted(program.graph.graph))
    lacking = tuple(
        Lacking(name, calls[name], taken_s / total_s, reasons[name], tuple(layers[name]))
        for name, taken_s in sorted(seconds.items(), key=lambda item: -item[1])
    )
    return Coverage(captured.name, device, calls[""], lacking)
