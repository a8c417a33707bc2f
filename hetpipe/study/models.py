"""Subjects of studies from a workload by name, or from a file of costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError, HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.records import read_json
from hetpipe.study.subject import Subject, of_chain, of_profile, of_table

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.zoo.workload import Workload

MEASURED_PARTS = (4, 32)
"""Costs are measured at two sizes: the mini-batch divided by each of these numbers."""
WARM_STEPS, TIMED_STEPS = 2, 5


class Model:
    """A workload as a subject of studies."""

    def __init__(
        self, workload: Workload, mini_batch: int | None = None, precision: str | None = None
    ) -> None:
        self.workload = workload
        self.precision = precision
        self.mini_batch = mini_batch or workload.mini_batch
        self.captured = cache(self._captured)

    @property
    def samples(self) -> int:
        """The micro-batch size of the first capture."""
        return -(-self.mini_batch // MEASURED_PARTS[0])

    @property
    def subject(self) -> Subject:
        """The subject of studies."""
        return Subject(
            self.workload.name,
            self.mini_batch,
            self.costs,
            self.measure,
            self.channels,
        )

    def costs(self, cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        """Return the costs of all members, modelled for boards and measured for attached devices.

        Raises `HetpipeError` if a device cannot be opened or a link is not described.
        """
        from hetpipe.profile.boards import attached_cluster, merge_tables

        devices = attached_cluster(cluster)
        if devices is None:
            return self._modelled(cluster, sorted({min(sizes), *sizes[::3], max(sizes)}))
        chosen = sorted({-(-self.mini_batch // parts) for parts in MEASURED_PARTS})
        tables = self._measured(devices, chosen)
        if not cluster.described:
            return tables
        modelled = self._modelled(cluster, chosen)
        return {size: merge_tables(table, modelled[size]) for size, table in tables.items()}

    def channels(self) -> dict[str, int]:
        """Return the output channels of all layers that can be split under the optimizer."""
        from hetpipe.capture.passes.update_programs import check_elementwise
        from hetpipe.zoo.load import optimizer_of

        captured = self.captured()
        matrices = [name for name, value in captured.parameters.items() if value.ndim >= 2]
        try:
            first = dict.fromkeys(matrices[:1], 1)  # one is enough: all are updated in the same way
            check_elementwise(optimizer_of(self.workload), first, captured.parameters)
        except HetpipeError:
            return {}
        return captured.channels

    def measure(self, cluster: Cluster, plan: Plan, costs: CostTable) -> float:
        """Return the median seconds of a step of the plan on attached devices."""
        from hetpipe.train.training import open_pipeline

        captured = None if plan.splits else self.captured()  # a split model is captured again
        with open_pipeline(
            self.workload, cluster, plan=plan, costs=costs, captured=captured,
            precision=self.precision,
        ) as pipe:  # fmt: skip
            batches = self.workload.batches(plan.mini_batch, 0)
            steps_s = []
            for _ in range(WARM_STEPS + TIMED_STEPS):
                batch = next(batches)
                begin_s = time.perf_counter()
                pipe.step(*batch)
                steps_s.append(time.perf_counter() - begin_s)
        return statistics.median(steps_s[WARM_STEPS:])

    def _captured(self) -> Captured:
        from hetpipe.capture.captured import Captured
        from hetpipe.capture.precision import Precision

        example = next(self.workload.batches(self.mini_batch, 0))
        return Captured(
            self.workload.model, self.workload.loss_fn, example, Precision(self.precision),
            samples=self.samples,
        )  # fmt: skip

    def _modelled(self, cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        from hetpipe.profile.boards import modelled_costs
        from hetpipe.zoo.load import optimizer_of

        return modelled_costs(self.captured(), cluster, optimizer_of(self.workload), sizes)

    def _measured(self, cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        from hetpipe.crew.crew import Crew
        from hetpipe.profile.measure import profile
        from hetpipe.zoo.load import optimizer_of

        with Crew.start(cluster) as crew:
            return profile(self.captured(), crew, optimizer_of(self.workload), sizes)


def of_model(name: str, mini_batch: int | None = None, precision: str | None = None) -> Model:
    """Return the workload of this name, with passes in this precision. Raises `HetpipeError` for an
    unknown name."""
    from hetpipe.zoo.load import load_workload

    return Model(load_workload(name), mini_batch, precision)


def of_file(
    path: Path,
    samples: int | None,
    mini_batch: int | None,
    profiled_on: str,
    *,
    cut_nbytes: int | None = None,
    unit_s: float = 1e-3,
) -> Subject:
    """Return the costs in a file as a subject; the name and content of the file show its format.

    `cut_nbytes` and `unit_s` are for profiles in JSON, which lack these values (see `read_chain`).
    Raises `CostError`.
    """
    if path.suffix == ".json":
        data = read_json(path, CostError)
        if isinstance(data, dict) and "devices" in data and "version" in data:
            table = CostTable.from_json(data, str(path))
            usual = next((c.mini_batch for c in table.whole_loss.values()), 8 * table.samples)
            return of_table(table, mini_batch or usual)
    if samples is None:
        raise CostError(
            f"{path} does not say its micro-batch; give the number of samples, as --samples 32"
        )
    total = mini_batch or 8 * samples
    if path.suffix != ".json":
        if cut_nbytes is not None:
            raise CostError(
                f"{path} has the bytes of its cuts; leave cut_nbytes (--cut-nbytes) out"
            )
        return of_profile(path, samples, total, profiled_on)
    from hetpipe.cost.importers import read_chain

    chain = read_chain(path, cut_nbytes=cut_nbytes, unit_s=unit_s)
    return of_chain(path.stem, chain, samples, total, profiled_on)
