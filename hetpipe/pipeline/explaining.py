"""Explaining: gathers the facts of a training for an explanation, and changes nothing."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from hetpipe.explain.explanation import Explanation, Measured, explain
from hetpipe.pipeline.learning import scale_costs
from hetpipe.pipeline.planning import EXPLORED_MICROBATCHES
from hetpipe.profile.stored import stored_costs

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.pipeline.measurements import Measurements
    from hetpipe.pipeline.setup import Setup
    from hetpipe.pipeline.training import Training

LATEST = 8
"""The number of latest mini-batches whose median is the measured step."""


def explain_training(
    training: Training, measurements: Measurements, costs: CostTable | None
) -> Explanation:
    """Explain a training by its present costs. Nothing is measured or flushed."""
    tables = {} if costs is None else tables_near(training.setup, costs, training.plan.mini_batch)
    measured = _measured(training, measurements) if training.recent else None
    return explain(training.plan, tables, measured=measured)


def _measured(training: Training, measurements: Measurements) -> Measured:
    history, plan = training.results.history, training.plan
    step_s = measurements.modelled_step_s
    if step_s is None:
        took_s = [each.took_s for each in history if each.samples == plan.mini_batch]
        step_s = median(took_s[-LATEST:]) if took_s else None
    return Measured(
        measurements.timeline,
        step_s,
        measurements.peak_nbytes,
        [(each.index, each.loss) for each in history],
    )


def tables_near(setup: Setup, costs: CostTable, mini_batch: int) -> dict[int, CostTable]:
    """Return `costs`, and the costs of other sizes of micro-batches that need no measurement.

    Stored costs are scaled by each device's time of the whole model in `costs`, over its time in
    the stored costs of the same size.
    """
    counts = [count for count in (1, 2, *EXPLORED_MICROBATCHES) if count <= mini_batch]
    sizes = sorted({costs.samples, *(-(-mini_batch // count) for count in counts)}, reverse=True)
    captured, crew, optimizer = setup.captured, setup.crew, setup.optimizer
    if crew.cluster.described:
        return {costs.samples: costs}
    stored = stored_costs(captured, crew, optimizer, sizes)
    like = stored.get(costs.samples)
    if like is None or like.devices.keys() != costs.devices.keys():
        return {costs.samples: costs}
    factors = {id: _model_s(costs, id) / _model_s(like, id) for id in costs.devices}
    near = {size: scale_costs(table, factors) for size, table in stored.items()}
    return {**near, costs.samples: costs}


def _model_s(table: CostTable, device: str) -> float:
    """Return the seconds of the layers that a device can run; 1 if it can run none."""
    layers = table.devices[device].layers
    return sum(cost.forward_s + cost.backward_s for cost in layers if not cost.impossible) or 1.0
