"""BaPipe's intra-layer partition: two neighbouring stages share a layer (section 3.3.2).

With whole layers, the slowest stage and its neighbour may take unequal times. Then the slowest
stage's layer at their cut is split by output channels, so that both stages take equal times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hetpipe.cost.split_costs import split_costs
from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError, PlanError
from hetpipe.plan.plan import Plan, Split
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import proposal_of

GAIN = 0.01  # a split with a smaller relative gain is not made


def with_splits(plan: Plan, priced: Priced) -> tuple[Plan, Priced]:
    """Return the plan with the splits that shorten its predicted step, and the prices with them.

    `priced.options.channels` names the layers that can be split.
    """
    best = plan, priced
    for _ in plan.stages:  # at most as many splits as stages
        better = min(_candidates(*best), key=lambda pair: pair[0].step_s, default=best)
        if better[0].step_s >= best[0].step_s * (1 - GAIN):
            break
        best = better
    return best


def split_table(table: CostTable, split: Split, channels: Mapping[str, int]) -> CostTable:
    """Return the costs after a split. Raises `CostError` if they cannot be computed."""
    return split_costs(table, split.layer, split.layers, split.channels / channels[split.layer])


def _candidates(plan: Plan, priced: Priced) -> Iterator[tuple[Plan, Priced]]:
    """Yield plans in which the slowest stage gives a share of its first layer to the previous
    stage, or a share of its last layer to the next stage."""
    stages, rule = plan.stages, plan.rule
    if max(map(len, (stage.devices for stage in stages))) > 1 or rule.several_stages:
        return
    slowest = max(range(len(stages)), key=lambda n: stages[n].forward_s + stages[n].backward_s)
    for other in (slowest - 1, slowest + 1):
        if not 0 <= other < len(stages):
            continue
        after = other > slowest
        layer = stages[slowest].hi - 1 if after else stages[slowest].lo
        split = _split(plan, priced, slowest, other, layer)
        if split is not None:
            # Cuts from `behind` on move by one layer: the two stages then meet between the parts.
            behind = layer + 2 * after
            cuts = tuple(cut + (cut >= behind) for cut in plan.cuts)
            try:
                yield _planned(plan, priced, split, cuts)
            except (CostError, PlanError):
                continue


def _split(plan: Plan, priced: Priced, slowest: int, other: int, layer: int) -> Split | None:
    """Return the split of a layer that gives two stages equal times."""
    name = plan.layers[layer]
    channels = priced.options.channels.get(name, 0)
    if channels < 2:
        return None
    table = priced.table(priced.options.size(plan.microbatches))
    times_s, layers_s = [], []
    for stage in (plan.stages[slowest], plan.stages[other]):
        cost = table.devices[stage.devices[0]].layers[layer]
        times_s.append(stage.forward_s + stage.backward_s)
        layers_s.append(cost.forward_s + cost.backward_s)
    if not 0 < sum(layers_s) < float("inf"):
        return None
    given = (times_s[0] - times_s[1]) / sum(layers_s)
    first = 1 - given if other > slowest else given
    count = round(first * channels)
    return Split(name, count) if 0 < count < channels else None


def _planned(
    plan: Plan, priced: Priced, split: Split, cuts: tuple[int, ...]
) -> tuple[Plan, Priced]:
    """Return the plan after a split, and the prices with it. Raises `CostError` and `PlanError`."""
    tables = {
        size: split_table(table, split, priced.options.channels)
        for size, table in priced.tables.items()
    }
    prices = Priced(tables, priced.options)
    proposal = replace(proposal_of(plan), cuts=cuts)
    return replace(prices.plan(proposal, plan.origin), splits=(*plan.splits, split)), prices
