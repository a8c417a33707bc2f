"""BaPipe's intra-layer partition: costs of the parts, the balancing split, and running its plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from hetpipe.capture import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cost.split_costs import split_costs
from hetpipe.cost.table import (
    CostTable,
    DeviceCost,
    LayerBytes,
    LayerCost,
    LinkCost,
    TiedBytes,
)
from hetpipe.errors import CostError
from hetpipe.optim import lamb
from hetpipe.plan.intra import with_splits
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.study import compare, of_model
from hetpipe.study.models import Model
from hetpipe.zoo.load import load_workload

NAMES = ("b[:3]", "b[3:]")
"""The parts of a layer split after 3 of its 12 channels."""


def table(*forwards_s: tuple[float, ...], overhead_s: float = 0.0) -> CostTable:
    """Return layers a, b, c, ... on devices 0, 1, ...; a backward takes twice as long as a
    forward."""
    devices = {
        str(number): DeviceCost(
            tuple(LayerCost(time_s, 2 * time_s, 0.0) for time_s in times_s),
            overhead_s, 1 << 30, str(number),
        )
        for number, times_s in enumerate(forwards_s)
    }  # fmt: skip
    layers = tuple(LayerBytes(name, 101, 101, 64, 32) for name in "abcdefgh"[: len(forwards_s[0])])
    links = {pair: LinkCost(0.0, 1e12) for pair in permutations(devices, 2)}
    return CostTable("toy", 4, layers, devices, links)


def test_parts_have_their_shares_and_the_whole_overhead() -> None:
    whole = table((3.0, 5.0, 4.0), (1.5, 3.0, 2.0), overhead_s=1.0)
    parts = split_costs(whole, "b", NAMES, 0.25)
    assert [layer.name for layer in parts.layers] == ["a", *NAMES, "c"]
    first, second = parts.devices["0"].layers[1:3]
    assert (first.forward_s, second.forward_s) == (2.0, 4.0)
    assert (first.backward_s, second.backward_s) == (1 + 9 / 4, 1 + 27 / 4)
    for device in "01":
        before, after = (each.forward_s(device, 0, len(each.layers)) for each in (whole, parts))
        assert after == pytest.approx(before)
    assert sum(layer.params_nbytes for layer in parts.layers) == sum(
        layer.params_nbytes for layer in whole.layers
    )
    input_nbytes, output_nbytes = (layer.cut_nbytes for layer in whole.layers[:2])
    assert parts.layers[1].cut_nbytes == input_nbytes + round(output_nbytes / 4)
    assert parts.layers[2].cut_nbytes == output_nbytes
    assert parts.devices["0"].label == "modelled"


def test_layers_that_share_parameters_keep_their_numbers() -> None:
    tied = replace(table((1.0,) * 4), tied=(TiedBytes("w", 4, (0, 3)),))
    assert split_costs(tied, "b", NAMES, 0.5).tied[0].layers == (0, 4)
    with pytest.raises(CostError, match="d shares a parameter with another"):
        split_costs(tied, "d", NAMES, 0.5)
    with pytest.raises(CostError, match=r"a is the first layer"):
        split_costs(tied, "a", NAMES, 0.5)
    with pytest.raises(CostError, match="no layer 'x'; the table has 4 others"):
        split_costs(tied, "x", NAMES, 0.5)


def bapipe(costs: CostTable, microbatches: int, **channels: int) -> tuple[float, list[object]]:
    cluster = Cluster(tuple(Member(id, "x") for id in costs.devices))
    options = PlannerOptions(
        microbatches * costs.samples, (microbatches,), channels=channels, replicas=False
    )
    plan = planned({costs.samples: costs}, cluster, options, "bapipe")
    return plan.step_s, [(split.layer, split.channels) for split in plan.splits]


def test_a_split_balances_two_stages() -> None:
    """1 + 6 + 1 on equal devices: 7 and 1 without a split; a split of b balances them at 4 and
    4."""
    costs = table((1.0, 6.0, 1.0), (1.0, 6.0, 1.0))
    whole_s, none = bapipe(costs, 16)
    split_s, splits = bapipe(costs, 16, b=12)
    assert (none, splits) == ([], [("b", 6)])
    assert split_s == pytest.approx(whole_s * 4 / 7, rel=0.1)


def test_a_fast_device_gets_the_larger_part() -> None:
    """1, 6, 1 s and 2, 12, 2 s: with a share x of b on the fast device, 1 + 6 x = 12 (1 - x) +
    2."""
    _, splits = bapipe(table((1.0, 6.0, 1.0), (2.0, 12.0, 2.0)), 16, b=180)
    assert splits == [("b", pytest.approx(180 * 13 / 18, abs=1))]


def test_a_layer_that_cannot_be_split_stays_whole() -> None:
    assert bapipe(table((1.0, 6.0, 1.0), (1.0, 6.0, 1.0)), 16, c=12)[1] == []
    assert bapipe(table((1.0, 6.0, 1.0), (1.0, 6.0, 1.0)), 16, b=1)[1] == []


def test_equal_stages_need_no_split() -> None:
    costs = table((4.0, 4.0), (4.0, 4.0))
    cluster = Cluster(tuple(Member(id, "x") for id in costs.devices))
    options = PlannerOptions(32, (8,), channels={"b": 12}, replicas=False)
    plan = planned({costs.samples: costs}, cluster, options, "bapipe")
    priced = Priced({costs.samples: costs}, options)
    assert with_splits(plan, priced) == (plan, priced)


def test_the_channels_of_a_captured_model() -> None:
    workload = load_workload("mlp")
    example = next(workload.batches(32, 0))
    captured = Captured(workload.model, workload.loss_fn, example, samples=8)
    linear = [name for name in captured.layer_names if name in captured.channels]
    assert [captured.channels[name] for name in linear] == [128] * 5 + [10]
    split = Captured(workload.model, workload.loss_fn, example, samples=8, split={linear[1]: 64})
    assert split.channels == {}


@pytest.mark.slow
def test_a_plan_with_a_split_runs(tmp_path: Path) -> None:
    """One device is three times as fast as the other, and no cut between the six layers fits
    that."""
    path = tmp_path / "two.toml"
    member = '[[device]]\nid = "{}"\ndevice = "numpy:cpu:0"\nspeed = {}\n'
    path.write_text(member.format("quick", 0.9) + member.format("slow", 0.3))
    comparison = compare(
        of_model("mlp").subject, Cluster.load(str(path)), planners=["bapipe"], measured=True
    )
    row = comparison.rows[0]
    assert row.why_not == ""
    assert row.measured_s is not None
    assert row.measured_s > 0


def test_no_channels_if_the_optimizer_reads_whole_parameters() -> None:
    workload = load_workload("mlp")
    assert Model(workload).channels()
    assert Model(replace(workload, optimizer=lamb(lr=0.01))).channels() == {}
