"""DAPPLE's planner: stages, replicas and their places for one global batch (DAPPLE, section 4)."""

from __future__ import annotations

from math import inf
from typing import get_args

from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.errors import PlanError
from hetpipe.plan.chain import check_finite
from hetpipe.plan.latency import (
    ADAM,
    DapplePlan,
    Formula,
    overlapped_s,
)
from hetpipe.plan.pivots import Search
from hetpipe.plan.server_groups import Machines

WIDTH = 4  # partial plans


def plan_dapple(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    formula: Formula = "corrected",
    capacity_nbytes: float | None = None,
    width: int = WIDTH,
) -> DapplePlan:
    """Return the plan with the lowest estimated latency that uses all devices.

    A micro-batch has the profile's `samples`; r replicas take 1 / r of it each, in 1 / r of its
    times. A device keeps Adam's 16 bytes a parameter and the activations of P_A's micro-batches.
    `width` partial plans stay per layer and devices; the plan is optimal if no more than these are
    undominated. With more than 16 devices, replicas are powers of two and stages fill server after
    server. Raises `PlanError` if nothing fits `capacity_nbytes` per device.
    """
    batches = _microbatches(chain, samples, global_batch, formula)
    return _plans(chain, machines, batches, formula, capacity_nbytes, width)[0]


def candidates(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    formula: Formula = "corrected",
    capacity_nbytes: float | None = None,
    count: int = 8,
) -> tuple[DapplePlan, ...]:
    """Return up to `count` good plans in the order of their latency, to be ranked by simulation.

    They include data parallelism and one device a stage, as far as both fit the capacity. Raises
    `PlanError` as `plan_dapple` does.
    """
    batches = _microbatches(chain, samples, global_batch, formula)
    plans = _plans(chain, machines, batches, formula, capacity_nbytes, WIDTH)
    kept = dict.fromkeys(plans[:1])
    for replicas in (machines.devices, 1):
        search = Search(chain, machines, batches, formula, capacity_nbytes, 1, (replicas,))
        kept |= dict.fromkeys(search.plans()[:1])
    for plan in plans:
        if len(kept) < count:
            kept[plan] = None
    return tuple(sorted(kept, key=lambda plan: plan.latency_s))


def overlapped_data_parallel_s(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    capacity_nbytes: float | None = None,
) -> float:
    """Return the seconds of data parallelism with gradient accumulation and overlap.

    It accumulates over the fewest parts that fit the capacity. A layer's sum begins after its last
    backward, one sum at a time. Infinite if the parameters alone do not fit.
    """
    _microbatches(chain, samples, global_batch, "corrected")
    share = global_batch / samples / machines.devices
    accumulated = 1
    if capacity_nbytes is not None:
        room = capacity_nbytes - ADAM * sum(chain.params_nbytes)
        if room <= 0:
            return inf
        accumulated = max(1, int(-(-share * sum(chain.activation_nbytes) // room)))
    return overlapped_s(
        [share * time_s for time_s in chain.forward_s],
        [share * time_s for time_s in chain.backward_s],
        [machines.all_reduce_s(nbytes, machines.counts) for nbytes in chain.params_nbytes],
        accumulated,
    )


def _microbatches(chain: ChainCosts, samples: int, global_batch: int, formula: str) -> int:
    check_finite(chain)
    if formula not in get_args(Formula):
        raise PlanError(
            f"there is no formula {formula!r}; take one of {', '.join(get_args(Formula))}"
        )
    if samples < 1 or global_batch < samples or global_batch % samples:
        raise PlanError(
            f"a global batch of {global_batch} is not cut into micro-batches of {samples} samples: "
            "give a multiple"
        )
    return global_batch // samples


def _plans(
    chain: ChainCosts,
    machines: Machines,
    microbatches: int,
    formula: Formula,
    capacity_nbytes: float | None,
    width: int,
) -> list[DapplePlan]:
    """Return complete plans, the best first. Searches with few numbers of replicas come first, to
    set a bound for the later ones.

    Raises `PlanError` if nothing fits the capacity.
    """
    powers = [1 << power for power in range(machines.devices.bit_length())]
    replicas = sorted({*powers, machines.devices})
    bound_s = inf
    for first in reversed(range(len(replicas))):
        coarse = Search(
            chain, machines, microbatches, formula, capacity_nbytes, 1, replicas[first:], bound_s
        ).plans()
        bound_s = min([bound_s, *(plan.latency_s for plan in coarse[:1])])
    plans = Search(
        chain, machines, microbatches, formula, capacity_nbytes, width, None, bound_s
    ).plans()
    if plans:
        return plans
    raise PlanError(
        f"no plan of {machines.devices} devices fits {capacity_nbytes} bytes per device; the "
        f"model's parameters and Adam's state need {ADAM * sum(chain.params_nbytes)} bytes in "
        "all: give more devices, or smaller micro-batches"
    )
