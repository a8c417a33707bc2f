"""Data-parallel plans: rows by speed, compared with all ways to divide them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tables import make_table, plan_by

from hetpipe.errors import PlanError
from hetpipe.plan.building import replicated_plan
from hetpipe.plan.plan import Plan
from hetpipe.plan.pricing import predict, stage_times
from hetpipe.plan.proposal import Proposal
from hetpipe.plan.shares import all_reduce_s


def tables(speeds, sizes=(2, 4, 8, 16), **options):
    return {size: make_table(speeds, samples=size, **options) for size in sizes}


def test_equal_devices_get_equal_rows():
    plan = replicated_plan(tables({"a": 1.0, "b": 1.0}), ["a", "b"], mini_batch=32)
    (stage,) = plan.stages
    assert stage.devices == ("a", "b")
    assert stage.shares[0] == stage.shares[1]
    # 8 layers of 3 s per 4 samples for 16 samples each, and the update of 8 x 0.1 s
    assert plan.step_s == pytest.approx(8 * 3 * 4 + 0.8, rel=1e-6)


@pytest.mark.parametrize("speeds", [(1.0, 1.12), (1.0, 2.0), (3.0, 1.0), (1.0, 1.5, 2.5)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_division_of_rows_is_the_best(speeds, microbatches):
    named = {f"d{n}": speed for n, speed in enumerate(speeds)}
    plan = replicated_plan(
        tables(named, (1, 2, 4, 8, 16, 32)), list(named), mini_batch=32, microbatches=microbatches
    )
    samples = 32 // microbatches
    best = min(
        max(8 * 3 * rows / 4 / speed for rows, speed in zip(division, speeds, strict=True))
        for division in itertools.product(range(1, samples), repeat=len(speeds))
        if sum(division) == samples
    )
    (stage,) = plan.stages
    assert stage.forward_s + stage.backward_s == pytest.approx(best, rel=1e-9)
    assert sum(stage.shares) == samples


@pytest.mark.parametrize("mini_batch", [1, 2, 3, 32])
def test_the_search_ends_for_every_number_of_rows(mini_batch):
    """One measured size, so that all times are equal, and fewer rows than devices."""
    known = tables({"a": 2.0, "b": 1.0, "c": 1.0}, (8,))
    with pytest.raises(PlanError, match="no data-parallel plan"):
        replicated_plan(known, ["a", "b", "c"], mini_batch=mini_batch)


def test_the_search_ends_if_times_fall_with_rows():
    """Noise: the largest size was measured as faster than half of it."""
    speeds = {2: 1.0, 16: 0.5, 32: 3.0}
    known = {
        size: make_table({"a": speed, "b": speed}, samples=size) for size, speed in speeds.items()
    }
    plan = replicated_plan(known, ["a", "b"], mini_batch=32, microbatches=1)
    assert sum(plan.stages[0].shares) == 32


def test_gradients_cross_in_both_directions():
    """8 layers of 1 MiB of parameters, there and back, at 1 MiB/s and 0.5 s latency."""
    known = tables({"a": 1.0, "b": 1.0}, latency_s=0.5, bandwidth=float(1 << 20))
    plan = replicated_plan(known, ["a", "b"], mini_batch=32)
    assert plan.stages[0].all_reduce_s == pytest.approx(2 * (0.5 + 8))
    table = known[plan.share_samples]
    assert predict(plan, table).total_s == pytest.approx(plan.step_s)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("change", [{"copying": 0.0}, {"label": "emulated"}])
def test_where_a_message_waits_for_its_link_sums_upload_in_no_time(change):
    """Replicas send 8 MiB to each other at the same time, at 1 MiB/s and 0.5 s latency."""
    (table,) = tables({"a": 1.0, "b": 1.0}, (4,), latency_s=0.5, bandwidth=float(1 << 20)).values()
    links = {way: replace(link, **change) for way, link in table.links.items()}
    assert all_reduce_s(replace(table, links=links), "ab", 0, 8) == pytest.approx(0.5 + 8)


def test_shares_outside_the_measured_sizes_are_refused():
    with pytest.raises(PlanError, match="between the measured sizes 2 and 4"):
        replicated_plan(
            tables({"a": 1.0, "b": 1.0}, (2, 4)), ["a", "b"], mini_batch=32, microbatches=1
        )
    with pytest.raises(PlanError, match="there must be two or more"):
        replicated_plan(tables({"a": 1.0}), ["a"], mini_batch=32)


def test_stages_hide_all_but_the_last_of_their_sums():
    """8 layers of 1 s and 2 s; 1 MiB there and back takes 2 s, less than the backward of its
    stage."""
    known = tables({"a": 1.0, "b": 1.0}, bandwidth=float(1 << 20))
    whole = replicated_plan(known, ["a", "b"], mini_batch=8, microbatches=1)
    cut = replicated_plan(known, ["a", "b"], [2, 4, 6], mini_batch=8, microbatches=1)
    assert cut.cuts == (2, 4, 6)
    assert {stage.devices for stage in cut.stages} == {("a", "b")}
    sums_s = [stage.all_reduce_s for stage in cut.stages]
    assert sum(sums_s) == pytest.approx(whole.stages[0].all_reduce_s)
    assert whole.step_s - cut.step_s == pytest.approx(sum(sums_s) - sums_s[0])
    with pytest.raises(PlanError, match=r"ascending, from 1 to 7"):
        replicated_plan(known, ["a", "b"], [4, 8], mini_batch=8)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_of_each_mini_batch_hide_behind_passes(replicas):
    """Per round the step counts the slowest replica's passes, and all updates on each replica."""
    named = {f"d{n}": 1.0 + n for n in range(replicas)}
    known = tables(named, (8,), latency_s=0.5, bandwidth=float(1 << 20))
    plan = plan_by(known, Proposal((), (tuple(named),), "asp", 1), 8, "stash")
    (stage,) = plan.stages
    assert stage.forward_s + stage.backward_s == pytest.approx(8 * 3 * 2)
    assert plan.step_s == pytest.approx((8 * 3 * 2) / replicas + 0.8)
    assert predict(plan, known[8]).workers == tuple(named)
    links = stage_times(plan, known[8]).gradient_links
    assert links[0].latency_s + links[0].occupancy_s == pytest.approx(
        8.5 if replicas > 1 else 0.0
    )  # 8 MiB at 1 MiB/s
