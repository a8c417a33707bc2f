"""Plans from a table of costs alone, without workers and without the devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.cli.check import check_devices
from hetpipe.errors import PlanError
from hetpipe.words import word, words

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.plan.plan import Plan
    from hetpipe.zoo.workload import Workload


def plan_by(
    costs: CostTable, devices: list[str] | None, mini_batch: int, asked: PlanOptions
) -> Plan:
    """Return the plan with the shortest predicted step on `devices` of the table (default: all).

    Its micro-batches have the size of the table. Raises `PlanError`.
    """
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.pipeline.planning import Planning

    members = devices or list(costs.devices)
    for member in members:
        if member not in costs.devices:
            raise PlanError(
                f"no costs for {word(member)}; the table has costs for {words(costs.devices)}"
            )
    check_devices(asked, len(members))
    asked = replace(asked, microbatches=microbatches_of(costs, mini_batch, asked.microbatches))
    layers = [layer.name for layer in costs.layers]
    cluster = Cluster.with_ids(members)
    planning = Planning(
        costs.model, layers, cluster, mini_batch, lambda sizes: {costs.samples: costs}
    )
    return planning.choose(asked)[0]


def microbatches_of(costs: CostTable, mini_batch: int, asked: int | None) -> int:
    """Count the micro-batches of the table's size in a mini-batch. Raises `PlanError`."""
    count = -(-mini_batch // costs.samples)
    samples = -(-mini_batch // (asked or count))
    if samples != costs.samples:
        raise PlanError(
            f"the costs are for micro-batches of {costs.samples} samples, but each of the "
            f"{asked or count} micro-batches of a mini-batch of {mini_batch} has {samples}: "
            f"profile with --microbatches {asked or count}, or choose another number"
        )
    return count if asked is None else asked


def check_layers(costs: CostTable, workload: Workload, mini_batch: int) -> None:
    """Raise `PlanError` if the table has the costs of another model."""
    from hetpipe.capture.captured import Captured

    example = next(workload.batches(mini_batch, 0))
    captured = Captured(workload.model, workload.loss_fn, example, samples=costs.samples)
    layers = list(captured.layer_names)
    names = [layer.name for layer in costs.layers]
    if layers != names:
        raise PlanError(
            f"the costs are of {costs.model} with {len(names)} layers, {workload.name} has "
            f"{len(layers)} layers" + _difference(names, layers) + ": profile this model"
        )


def _difference(names: list[str], layers: list[str]) -> str:
    pairs = zip(names, layers, strict=False)
    for number, (name, layer) in enumerate(pairs):
        if name != layer:
            return f", and layer {number} is {name} there, {layer} here"
    return ""
