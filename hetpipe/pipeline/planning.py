"""Planning: chooses a pipeline's plan by measured costs, and checks a plan that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, permutations
from typing import TYPE_CHECKING

from hetpipe.cost.loss import Label
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.division import divide_samples
from hetpipe.errors import PlanError
from hetpipe.pipeline.earlier import EarlierPlans
from hetpipe.pipeline.lent import with_program_notes
from hetpipe.plan.building import build_plan, costs_of, replicated_plan
from hetpipe.plan.interval import with_interval
from hetpipe.plan.limits import check_able
from hetpipe.plan.plan import Plan, splits_of
from hetpipe.plan.planner import make_plan, with_notes
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.proposal import PlannerOptions, Proposal, nearest_table
from hetpipe.profile.boards import board_costs
from hetpipe.profile.losses import LossPrices
from hetpipe.profile.measure import profile
from hetpipe.schedule.rule import ONE_F_ONE_B, Rule, rule_of
from hetpipe.schedule.weights import FLUSH, WeightPolicy, policy_for

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.layers import LayerGraph
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.profile.measure import Progress
    from hetpipe.profile.rounds import Effort
from hetpipe.profile.stored import cost_parts, stored_costs

EXPLORED_MICROBATCHES = (4, 8, 16, 32)
STAGED_MICROBATCHES = 8
"""The default number of micro-batches if the user gives stages and replicas."""


def microbatches_of(asked: PlanOptions) -> int:
    """Return the number of micro-batches that the options give, or else the first number to try."""
    if asked.plan is not None:
        return asked.plan.microbatches
    return asked.microbatches or EXPLORED_MICROBATCHES[0]


Tables = Callable[[Sequence[int]], dict[int, CostTable]]
"""Returns the costs at each of the given micro-batch sizes; the largest size comes first."""


def planning_for(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    mini_batch: int,
    progress: Progress,
    report: Callable[[Effort], None],
) -> Planning:
    """Return the `Planning` for a model on a crew. `report` gets the effort of a profile.

    With boards no plan is kept for later pipelines, because modelled costs do not vary.
    """
    measured = captured, crew, optimizer
    with_loss = LossPrices(captured, crew).added
    if crew.cluster.described:
        return Planning(
            captured.name, captured.layer_names, crew.cluster, mini_batch,
            with_loss(partial(board_costs, *measured, progress=progress, report=report)),
            whole_batch_statistics=bool(captured.updated_buffers), label="modelled",
            noted=partial(with_program_notes, *measured),
        )  # fmt: skip
    return Planning(
        captured.name, captured.layer_names, crew.cluster, mini_batch,
        with_loss(partial(profile, *measured, progress=progress, report=report)),
        with_loss(partial(stored_costs, *measured)), captured.layer_graph, crew.label,
        bool(captured.updated_buffers), EarlierPlans(cost_parts(*measured)),
        partial(with_program_notes, *measured),
    )  # fmt: skip


@dataclass(frozen=True)
class Planning:
    """Makes plans for a `model` with these `layers` on a cluster; profiles only if necessary."""

    model: str
    layers: Sequence[str]
    cluster: Cluster
    mini_batch: int
    tables: Tables
    stored: Tables | None = None  # costs without a measurement; None: `tables` measures nothing
    graph: Callable[[int], LayerGraph] | None = None  # layer graph for a micro-batch size
    label: Label = "measured"  # label of times on these members
    whole_batch_statistics: bool = True
    """Whether results depend on how replicas divide a micro-batch, as with batch norms."""
    earlier: EarlierPlans | None = None
    noted: Callable[[Plan], Plan] = lambda plan: plan
    """Returns a plan with notes about the programs of its stages."""
    seen: dict[int, CostTable] = field(default_factory=dict)
    """The costs that were used, by the samples of a micro-batch."""

    @property
    def members(self) -> list[str]:
        """The ids of the cluster's members."""
        return list(self.cluster.ids)

    def choose(self, asked: PlanOptions) -> tuple[Plan, CostTable | None]:
        """Return a plan and its costs: the user's plan, or the fastest that meets the options.

        If the options decide everything and do not ask for measured costs, nothing is measured;
        then the costs are stored costs or None. Raises `PlanError`.
        """
        if asked.plan is not None:
            return asked.plan, self._check(asked.plan, asked)
        plan, costs = self._chosen(asked)
        return self.noted(replace(plan, splits=splits_of(asked.split))), costs

    def _chosen(self, asked: PlanOptions) -> tuple[Plan, CostTable | None]:
        if asked.schedule == "auto":
            rule, policy = ONE_F_ONE_B, FLUSH
        else:
            rule = rule_of(asked.schedule)
            policy = policy_for(rule, asked.weights)
        if rule.replicates:
            return self._replicated(asked, rule)
        if not rule.averages:
            return self._staged(asked, rule, policy, asked.replicas or [len(self.members)])
        if asked.replicas is not None:
            return self._staged(asked, rule, policy, asked.replicas)
        return self._explored(asked, rule, policy)

    def _explored(
        self, asked: PlanOptions, rule: Rule, policy: WeightPolicy
    ) -> tuple[Plan, CostTable | None]:
        """Return the fastest plan that meets the options; with `cuts`, the first members have a
        stage each."""
        counts = [asked.microbatches] if asked.microbatches else list(EXPLORED_MICROBATCHES)
        if asked.microbatches is None and not (rule.flushes or policy.accumulates):
            counts = [1]  # one micro-batch per update makes updates early
        if asked.cuts is None:
            return self._searched(asked, rule, policy, counts)
        prices = self._stored if asked.decided and not asked.priced else self._profiled
        tables = prices(counts[:1])
        if not tables:
            return self._unpriced(asked, rule, policy), None
        schedule = ONE_F_ONE_B.name if asked.schedule == "auto" else rule.name
        table = tables[self._samples(counts[0])]
        plan = make_plan(
            table, self.members[: len(asked.cuts) + 1], mini_batch=self.mini_batch,
            microbatches=counts[0], schedule=schedule, weights=policy.name, cuts=asked.cuts,
        )  # fmt: skip
        return plan, table

    def _searched(
        self, asked: PlanOptions, rule: Rule, policy: WeightPolicy, counts: Sequence[int]
    ) -> tuple[Plan, CostTable]:
        """Return the fastest plan that the planner finds with these numbers of micro-batches."""
        free = asked.schedule == "auto" and asked.rebalance is None
        options = PlannerOptions(
            self.mini_batch, tuple(counts) if len(counts) == 1 else (),
            () if asked.schedule == "auto" else (rule.name,), policy.name,
            replicas=free and not self.whole_batch_statistics,
        )  # fmt: skip
        # Every size needs separate programs. So at first only the smallest and the largest size
        # are measured, and stored sizes are read; then the sizes of plans that are the best by
        # interpolated costs are measured.
        key = {**asked.keywords, "members": list(self.cluster.ids)}  # without spares
        ends = self._sizes([counts[0], counts[-1]])
        tables = self._costs(sorted({*ends, *self._stored(counts)}, reverse=True))
        while True:
            best = plan_on(tables, self.cluster, options)
            kept = self.earlier and self.earlier.kept(best, tables, key)
            size = self._samples(best.microbatches)
            if kept or size in tables or min(best.replicas) > 1:
                break
            measured = self._costs([size])
            if size not in measured:  # the user's costs lack this size
                break
            tables |= measured
        if self.earlier and not kept:
            self.earlier.keep(best, key)
        best = kept or best
        return with_notes(best, tables, self.members, options), nearest_table(tables, best)

    def _unpriced(self, asked: PlanOptions, rule: Rule, policy: WeightPolicy) -> Plan:
        """Return the plan that the user's options decide completely, without costs."""
        assert self.graph is not None
        assert asked.cuts is not None
        assert asked.microbatches is not None
        members = self.members[: len(asked.cuts) + 1]
        graph = self.graph(self._samples(asked.microbatches))
        plan = make_plan(
            free_table(self.model, graph, members, self.label), members,
            mini_batch=self.mini_batch, microbatches=asked.microbatches, schedule=rule.name,
            weights=policy.name, cuts=asked.cuts,
        )  # fmt: skip
        return without_price(plan)

    def _check(self, plan: Plan, asked: PlanOptions) -> CostTable | None:
        """Return the costs for a user's plan: costs that the user gives, measured costs if the
        options need measured costs, stored costs, or None.

        Raises `PlanError` if the plan belongs to another model or cluster, or if a device cannot
        run its layers.
        """
        if plan.stages[-1].hi != len(self.layers):
            raise PlanError(
                f"the plan is for {plan.stages[-1].hi} layers, the model has {len(self.layers)}: "
                "make a new plan for this model"
            )
        absent = [member for member in plan.all_devices if member not in self.members]
        if absent:
            raise PlanError(
                f"the plan uses {', '.join(dict.fromkeys(absent))}, the cluster has "
                f"{', '.join(self.members)}: the plan can be simulated, but not run here; "
                "give another plan, or a part of one, such as microbatches=4"
            )
        if asked.costs is not None:
            return asked.costs
        needed = asked.priced or asked.rebalance is not None
        prices = self._profiled if needed else self._stored
        costs = next(iter(prices([plan.microbatches]).values()), None)
        if costs is not None:
            check_able(plan, costs)
        return costs

    def _replicated(self, asked: PlanOptions, rule: Rule) -> tuple[Plan, CostTable]:
        """Return the fastest plan in which every member has all stages."""
        members, cuts = list(self.members), asked.cuts or ()
        everyone = [len(members)] * (len(cuts) + 1)
        if asked.replicas is not None and list(asked.replicas) != everyone:
            raise PlanError(
                f"replicas are {list(asked.replicas)}, but {rule.name} has a replica of every "
                f"stage on each of {len(members)} devices: remove replicas, or choose another "
                "schedule"
            )
        # A device may get any share, from one row to almost all rows: profile many sizes.
        tables = self._profiled([1, 2, *EXPLORED_MICROBATCHES, max(self.mini_batch // 2, 1)])
        plan = replicated_plan(
            tables, members, cuts, mini_batch=self.mini_batch, microbatches=asked.microbatches
        )
        return plan, nearest_table(tables, plan)

    def _staged(
        self, asked: PlanOptions, rule: Rule, policy: WeightPolicy, replicas: Sequence[int]
    ) -> tuple[Plan, CostTable]:
        """Return the plan with the user's cuts and these `replicas`, on the members in order."""
        members = list(self.members)
        if sum(replicas) > len(members):
            raise PlanError(
                f"replicas {list(replicas)} need {sum(replicas)} devices, the cluster has "
                f"{len(members)}: give fewer replicas, or add devices"
            )
        microbatches = asked.microbatches or (STAGED_MICROBATCHES if rule.flushes else 1)
        names = iter(members)
        groups = tuple(tuple(islice(names, count)) for count in replicas)
        parts = sorted({1, *replicas}) if rule.flushes else [1]
        tables = self._profiled([microbatches * part for part in parts])
        proposal = Proposal(tuple(asked.cuts or ()), groups, rule.name, microbatches)
        costs = costs_of(tables, proposal)
        plan = build_plan(proposal, costs, self.mini_batch, policy.name)
        table = tables[self._samples(microbatches)]
        return with_interval(plan, table), table

    def measure_for_losses(self, plan: Plan, shares: bool) -> None:
        """Measure the costs at sizes that a plan after a loss may need, unless they are known: of
        all rows of a micro-batch and, with `shares`, of the fewest rows that a replica has."""
        whole = self._samples(plan.microbatches)
        rows = [min(divide_samples(whole, stage.shares)) for stage in plan.stages]
        sizes = {whole, *rows} if shares and plan.rule.flushes else {whole}
        least, most = min(self.seen, default=whole), max(self.seen, default=0)
        if missing := [size for size in sizes if not least <= size <= most]:
            self._costs(sorted(missing, reverse=True))

    def _samples(self, microbatches: int) -> int:
        return -(-self.mini_batch // microbatches)

    def _profiled(self, counts: Sequence[int]) -> dict[int, CostTable]:
        """Return the costs for these numbers of micro-batches, by samples of a micro-batch."""
        return self._costs(self._sizes(counts))

    def _stored(self, counts: Sequence[int]) -> dict[int, CostTable]:
        """Return the costs for these numbers of micro-batches that need no measurement."""
        found = (self.stored or self.tables)(self._sizes(counts))
        self.seen.update(found)
        return found

    def _costs(self, sizes: Sequence[int]) -> dict[int, CostTable]:
        found = self.tables(sizes)
        self.seen.update(found)
        return found

    def _sizes(self, counts: Sequence[int]) -> list[int]:
        return sorted({self._samples(count) for count in counts}, reverse=True)


NOTE = "nothing was measured for this plan, so its times and memory are unknown"
DEPTHS = "stages have the depths of {}; with priced=True hetpipe measures, and chooses the depths"
ENDLESS_NBYTES = 1 << 62


def free_table(model: str, graph: LayerGraph, devices: Sequence[str], label: Label) -> CostTable:
    """Return a table in which layers cost nothing on any device, and memory is unlimited."""
    row = DeviceCost((LayerCost(0.0, 0.0, 0.0),) * len(graph), 0.0, ENDLESS_NBYTES, "", label=label)
    crossing = (*graph.cut_nbytes, 0)
    layers = tuple(
        LayerBytes(layer.name, 0, 0, 0, nbytes)
        for layer, nbytes in zip(graph.layers, crossing, strict=True)
    )
    links = dict.fromkeys(permutations(devices, 2), LinkCost(0.0, float("inf")))
    return CostTable(model, graph.samples, layers, dict.fromkeys(devices, row), links)


def without_price(plan: Plan) -> Plan:
    """Return a plan that was made with `free_table`. Notes name the unknown figures and choices."""
    stages = tuple(replace(stage, capacity_nbytes=0) for stage in plan.stages)
    chooses = len(stages) > 1 and plan.rule.any_depth
    notes = (NOTE, *([DEPTHS.format(plan.schedule)] if chooses else []))
    return replace(plan, stages=stages, interval_s=None, notes=notes)
