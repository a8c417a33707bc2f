"""BaPipe: its speed-ups over data parallelism, and the largest GNMT that its pipelines hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from hetpipe.cluster.cluster import Cluster, Link
from hetpipe.cost.published import read_profile
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.papers.reproduced.table import Row, expected
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.registry import plan as planned
from hetpipe.plan.proposal import PlannerOptions, Priced, Proposal, grouped
from hetpipe.study.largest import Method, fits, most, repeated
from hetpipe.study.subject import Subject, of_chain, of_profile, sizes_of

PROFILES = {"vgg16": ("vgg16", 128), "resnet50": ("resnet50", 128), "gnmt8": ("gnmt", 32)}
"""The profile of a model, and its batch."""
BATCH = 64
"""Samples a device of data parallelism and PipeDream; of BaPipe too, where the table has none."""
GPIPE = {"vgg16": (8, 32), "resnet50": (8, 64), "gnmt8_4": (8, 64), "gnmt8_8": (12, 64)}
"""GPipe's micro-batches and samples a device, by case or model."""
HALF_BATCH = {4: 0.62, 8: 0.55}
"""Throughput of data-parallel VGG-16 at 32 samples a device over that at 64, by devices."""

PCIE, SUMS, GLOO = "PCIe", "Gloo's sums", "all Gloo"
"""The links: all by the data sheet, sums of gradients at Gloo's rate, or all at Gloo's rate."""
LINKS = (PCIE, SUMS, GLOO)
METHODS = ("pipedream", "gpipe", "bapipe")

GNMT_BLOCKS = (("node15", "node19"), ("node37", "node42"))
"""First and last node of an encoder's and a decoder's LSTM layer in GNMT's profile."""
GNMT_LAYERS, GNMT_BATCH = 8, 32
GNMT_PARAMS = {32: 445.6, 42: 550.6, 60: 739.5, 74: 886.4, 118: 1350.0, 158: 1780.0}
"""Millions of parameters by layers, as table 4 has them."""


@dataclass(frozen=True)
class Case:
    """A model on so many devices of the paper's cluster; `microbatches` 0: data parallelism."""

    key: str
    path: Path
    microbatches: int
    batch: int

    @property
    def model(self) -> str:
        return self.key.rpartition("_")[0]

    @property
    def devices(self) -> int:
        return int(self.key.rpartition("_")[2])

    @property
    def cluster(self) -> Cluster:
        return Cluster.published(f"bapipe-{self.devices}-v100")

    @property
    def subject(self) -> Subject:
        return of_profile(self.path, PROFILES[self.model][1], self.devices * BATCH)

    def priced(self, cluster: Cluster, options: PlannerOptions) -> Priced:
        """The costs on a cluster, for these options."""
        return Priced(self.subject.costs(cluster, sizes_of(options.mini_batch)), options)

    def data_parallel(self, cluster: Cluster, batch: int = BATCH) -> Plan:
        """The whole model on each device, with so many samples of a mini-batch."""
        priced = self.priced(cluster, PlannerOptions(self.devices * batch))
        return priced.plan(Proposal((), (cluster.ids,), "data-parallel", 1), "data-parallel")


def speedups(data: Path) -> tuple[str, list[Row]]:
    """Table 3, with three views of the links."""
    figures = expected(data, "bapipe")["speedup_over_dp"]
    rates = {devices: gloo_Bps(data, devices) for devices in HALF_BATCH}
    rows = []
    for key, figure in figures.items():
        case = case_of(data, key, figure)
        by_links = {links: plans(case, links, rates[case.devices]) for links in LINKS}
        for method in METHODS:
            ours = {links: _speedup(by_links[links], method) for links in LINKS}
            text = ", ".join(f"{links} {_times(factor)}" for links, factor in ours.items())
            chosen = by_links[SUMS][method]
            name = f"{case.model} on {case.devices}, {method}"
            rows.append(Row(name, f"{figure[method]:.2f}x", text, _note(case, method, chosen)))
    shown = " and ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in rates.items())
    return (
        "Speed-up over data parallelism at 64 samples a device. Times and bytes of the one "
        "published batch in proportion to the samples, plus a launch for each layer. Links by "
        "PCIe's data sheet (15.75 GB/s); with sums of gradients at the rate of Gloo that follows "
        f"from the paper's data-parallel VGG-16 at 32 and 64 samples ({shown}); all at that rate",
        rows,
    )


def case_of(data: Path, key: str, figure: Mapping[str, float]) -> Case:
    """A case of table 3."""
    path = data / "profiles" / "pipedream" / f"{PROFILES[key.rpartition('_')[0]][0]}.txt"
    return Case(key, path, int(figure.get("M", 0)), int(figure.get("B", BATCH)))


def plans(case: Case, links: str, rate_Bps: float) -> dict[str, Plan | None]:
    """The plan of each method and of data parallelism; None: it lacks memory.

    GPipe has the stages of BaPipe's pipeline (section 4.2.1), and is data parallelism where the
    paper has no pipeline.
    """
    slow = slower(case.cluster, rate_Bps)
    cluster = slow if links == GLOO else case.cluster
    sums = cluster if links == PCIE else slow
    parallel = case.data_parallel(sums)
    samples = case.devices * case.batch
    counts = (case.microbatches,) if case.microbatches else ()
    tables = case.subject.costs(cluster, sizes_of(samples))
    pipeline = _planned(tables, cluster, PlannerOptions(samples, counts, replicas=False), "bapipe")
    quickest = max(
        (plan for plan in (pipeline, case.data_parallel(sums, case.batch)) if plan is not None),
        key=lambda plan: plan.samples_per_s,
    )
    return {
        "data-parallel": parallel,
        "pipedream": _pipedream(case, links, rate_Bps),
        "gpipe": _gpipe(case, cluster, pipeline) if case.microbatches else parallel,
        "bapipe": quickest,
    }


def gloo_Bps(data: Path, devices: int) -> float:
    """The rate of a link in all-reduces of the paper's data-parallel runs.

    Between 32 and 64 samples a device, passes grow and the sum does not; the ratio of throughputs
    and the profile's passes give the sum's time, and a ring's bytes its rate.
    """
    case = case_of(data, f"vgg16_{devices}", {})
    passes_s = []
    for batch in (BATCH // 2, BATCH):
        plan = case.data_parallel(case.cluster, batch)
        passes_s.append(plan.step_s - plan.stages[0].all_reduce_s)
    doubled = 2 * HALF_BATCH[devices]
    sum_s = (passes_s[1] - doubled * passes_s[0]) / (doubled - 1)
    params_nbytes = sum(read_profile(case.path).chain().params_nbytes)
    return 2 * (devices - 1) / devices * params_nbytes / sum_s


def slower(cluster: Cluster, rate_Bps: float) -> Cluster:
    """The cluster with another rate between all devices of its one server."""
    (server,) = cluster.servers
    assert server.inside is not None  # the file of the cluster has it
    inside = replace(server.inside, bandwidth_Bps=rate_Bps)
    return replace(cluster, servers=(replace(server, inside=inside),))


def _pipedream(case: Case, links: str, rate_Bps: float) -> Plan:
    """PipeDream's plan; its planner knows one rate, which with slow sums is theirs."""
    options = PlannerOptions(BATCH, (1,), ("pipedream",))
    slow = slower(case.cluster, rate_Bps)
    cluster = case.cluster if links == PCIE else slow
    tables = case.subject.costs(cluster, sizes_of(BATCH))
    chosen = planned(tables, cluster, options, "pipedream")
    if links != SUMS:
        return chosen
    groups = tuple(stage.devices for stage in chosen.stages)
    pairs = [frozenset(pair) for group in groups for pair in combinations(group, 2)]
    apart = replace(case.cluster, links=dict.fromkeys(pairs, Link(None, rate_Bps)))
    again = Proposal(chosen.cuts, groups, chosen.schedule, 1)
    return case.priced(apart, options).plan(again, "pipedream")


def _gpipe(case: Case, cluster: Cluster, pipeline: Plan | None) -> Plan | None:
    if pipeline is None:
        return None
    count, batch = GPIPE[case.key if case.key in GPIPE else case.model]
    groups = tuple(stage.devices for stage in pipeline.stages)
    priced = case.priced(cluster, PlannerOptions(case.devices * batch, (count,)))
    try:
        return priced.plan(Proposal(pipeline.cuts, groups, "gpipe", count), "gpipe")
    except PlanError:
        return None


def _planned(
    tables: Mapping[int, CostTable], cluster: Cluster, options: PlannerOptions, planner: str
) -> Plan | None:
    try:
        return planned(tables, cluster, options, planner)
    except PlanError:
        return None


def _speedup(by_method: Mapping[str, Plan | None], method: str) -> float | None:
    plan, parallel = by_method[method], by_method["data-parallel"]
    assert parallel is not None  # data parallelism fits in all cases of the paper
    return None if plan is None else plan.samples_per_s / parallel.samples_per_s


def _times(factor: float | None) -> str:
    return "out of memory" if factor is None else f"{factor:.2f}x"
