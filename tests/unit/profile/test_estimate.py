"""From measured rounds to costs: medians, the precision that a layer needs, spread, and time
alone."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cost.probe import Probe
from hetpipe.errors import CostError
from hetpipe.profile.clock import ClockWarning
from hetpipe.profile.estimate import Series
from hetpipe.profile.patterns import Network
from hetpipe.profile.profiler import BACKWARD, FORWARD, UPDATE, Times
from hetpipe.sdk.host.registry import get_backend

SIZE = 4


@pytest.fixture(scope="module")
def network() -> Network:
    """Return five layers of three patterns; three layers share the middle pattern."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    captured = Captured(model, F.mse_loss, (torch.randn(4, 3), torch.randn(4, 3)))
    tables = [get_backend("numpy").decompositions()] * 5
    return Network.of(captured.stage_graphs(range(1, 5), tables, [SIZE], hp.optim.sgd(0.1)))


def timed(*rounds: dict[int, float]) -> Times:
    """Return times of rounds, each with a forward's seconds by pattern; a backward takes twice
    as long."""
    own = Times()
    for each in rounds:
        for pattern, time_s in each.items():
            own.times_s[SIZE, pattern, FORWARD].append(time_s)
            own.times_s[SIZE, pattern, BACKWARD].append(2 * time_s)
        own.rounds_s.append(3 * sum(each.values()))
    return own


def even(pattern_s: float = 1.0) -> dict[int, float]:
    return {0: pattern_s, 1: pattern_s, 2: pattern_s}


def series(network: Network, *beside: Times, **options: object) -> Series:
    return Series("a (numpy:cpu:0)", network, {}, beside, **options)  # type: ignore[arg-type]


def test_equal_layers_have_the_cost_of_their_pattern(network: Network) -> None:
    rows = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 4.0, 2: 3.0}
    own = series(network, timed(*rows), timed({0: 1.0, 1: 3.0, 2: 3.0}))
    costs = own.layers(SIZE)
    assert [cost.forward_s for cost in costs] == [1.0, 3.0, 3.0, 3.0, 3.0]
    assert [cost.backward_s for cost in costs] == [2.0, 6.0, 6.0, 6.0, 6.0]
    assert [round(cost.spread, 6) for cost in costs] == [0.0, *[round(1 / 6, 6)] * 3, 0.0]


def test_an_update_includes_its_effect_on_the_next_passes(network: Network) -> None:
    after, then = timed(even(1.5), even(9.0), even(1.5)), timed(even(), even(8.5), even())
    for pattern in range(3):
        after.times_s[0, pattern, UPDATE] = [0.25, 0.25, 0.25]
    costs = series(network, timed(even(), even()), updates=(after, then)).layers(SIZE)
    assert [cost.update_s for cost in costs] == [0.25 + 0.5 + 2 * 0.5] * 5
    costs = series(network, timed(even(), even()), updates=(then, after)).layers(SIZE)
    assert [cost.update_s for cost in costs] == [0.0] * 5, "no update was measured"


def test_a_layer_without_times_has_no_cost(network: Network) -> None:
    rows = {0: 1.0, 1: 1.0}
    with pytest.raises(CostError, match="layer 4 was not measured at micro-batches of 4"):
        series(network, timed(rows, rows)).check([SIZE])


def test_a_small_layer_needs_less_precision(network: Network) -> None:
    """Both times vary by half; one layer takes a thousandth of the network, the other most of
    it."""
    rows = [{0: 1e-4 * n, 1: 0.05, 2: 0.1 * n} for n in (1.0, 1.5, 1.0, 1.5, 1.0, 1.5)]
    assert series(network, timed(*rows)).uncertain(SIZE) == [2]
    steady = [even() for _ in range(3)]
    assert series(network, timed(*steady)).uncertain(SIZE) == []
    assert series(network, timed(*steady[:2])).uncertain(SIZE) == [0, 1, 2], "two are too few"


def test_slices_without_some_patterns_count_for_the_spread(network: Network) -> None:
    slices = [timed(even(0.9)), timed(even(1.0)), timed({1: 1.1}), timed({1: 1.0}), timed(even())]
    assert series(network, *slices).spread(SIZE) == 0.0
    slices += [timed(even(0.9)), timed({1: 1.1}), timed(even(1.1))]
    assert series(network, *slices).spread(SIZE) == pytest.approx(0.0625)
    assert series(network, timed(even(), even(2.0))).spread(SIZE) == 0.0, "one is not enough"


def test_costs_come_from_the_usual_slice(network: Network) -> None:
    """An interruption hits one pass of five, each time another one: medians hide it, the sum
    does not."""
    slices = []
    for interrupted in range(5):
        rows = [even(3.0 if number == interrupted else 1.0) for number in range(5)]
        slices.append(timed(*rows))
    own = series(network, *slices)
    assert own.usual(SIZE) == pytest.approx(1.4)
    assert [cost.forward_s for cost in own.layers(SIZE)] == pytest.approx([1.4] * 5)


def test_time_alone_over_time_beside_others(network: Network) -> None:
    beside = [timed(even(), even())]
    assert series(network, *beside, alone=[timed(even(0.5))]).alone_factor(SIZE) == 0.5
    assert series(network, *beside, alone=[timed(even(1.5))]).alone_factor(SIZE) == 1.0
    assert series(network, *beside).alone_factor(SIZE) == 1.0
    noisy = [timed(even(time_s)) for time_s in (0.5, 1.0, 1.5)]
    assert series(network, *noisy, alone=[timed(even(0.8))]).alone_factor(SIZE) == 1.0
    assert series(network, *noisy, alone=[timed(even(0.6))]).alone_factor(SIZE) < 0.7


def test_bad_times_are_ignored_everywhere(network: Network) -> None:
    nan = float("nan")
    own = series(network, timed(even(), even(nan), even(-1.0), even(), even()))
    with pytest.warns(
        ClockWarning, match=r"a \(numpy:cpu:0\): a pass took nan s.*: 12 of 30 times"
    ):
        own.check([SIZE])
    assert [cost.forward_s for cost in own.layers(SIZE)] == [1.0] * 5
    assert own.spread(SIZE) == 0.0
    with pytest.raises(CostError, match=r"a forward of layer 0 took 0\.0 s, in 2 of 3"):
        series(network, timed(even(), even(0.0), even(0.0))).check([SIZE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        series(network, timed(even())).check([SIZE])


def test_the_probe_comes_from_the_usual_slice(network: Network) -> None:
    """Other work slows slices and their probes equally; costs and probe belong to the same
    speed."""
    paces = (1.0, 1.0, 2.0, 4.0, 1.0)
    slices = [timed(even(pace), even(pace)) for pace in paces]
    probes = [Probe(1e-3 * pace, 2e-3 * pace, 0.5, 128, 1024) for pace in paces]
    probe = series(network, *slices).usual_probe(probes, [SIZE])
    assert probe is not None
    assert (probe.arithmetic_s, probe.memory_s) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert probe.spread == pytest.approx(0.0)
    # Other work disturbed most probes, but not their slices.
    alone = [Probe(1e-3, 2e-3, 0.5, 128, 1024), *3 * [Probe(2e-3, 4e-3, 0.5, 128, 1024)]]
    steady = [timed(even()) for _ in alone]
    usual = series(network, *steady).usual_probe(alone, [SIZE])
    assert usual is not None
    assert usual.arithmetic_s == pytest.approx(2e-3)
    assert series(network, Times(), *slices).usual_probe([probes[3], *probes], [SIZE]) == (
        series(network, *slices).usual_probe(probes, [SIZE])
    ), "a slice without passes tells nothing"
    assert series(network, Times()).usual_probe(probes[:1], [SIZE]) is None
