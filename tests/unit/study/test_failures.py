"""The cost of failures: the simulation against closed forms, a slow clock, and its own order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from profile_files import write_profile
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.topology import Link
from hetpipe.cost.pipedream_profile import ProfileGraph, ProfileNode
from hetpipe.errors import HetpipeError
from hetpipe.plan.survival import expected_s
from hetpipe.study.outage import Event, Failures, Policy, Run
from hetpipe.study.policies import (
    DISK,
    HETPIPE,
    REDUNDANT,
    REROUTED,
    Assumptions,
    Trained,
    policies,
)
from hetpipe.study.subject import Subject, of_profile
from hetpipe.study.survivors import FailureStudy, Trials, failures, hosts_of_boards, rates

BOARDS = {"v100-pcie-16": 4, "a100-40": 4}
HORIZON_S = 1500.0
LINKS = Link(5e-6, 12e9), Link(2e-5, 1e9)
RATES = (0.0, 1.0, 6.0)
HOSTS = [np.arange(4), np.arange(4, 8)]


def without_rate(without):
    """Return a rate that falls with each lost device."""
    return 0.5 * (1 - np.count_nonzero(without) / len(without))


def steady_rate(without):
    """Return a rate that falls so little that repaired devices join for nothing."""
    return 0.5 * (1 - 1e-9 * np.count_nonzero(without))


def fast(rate):
    """Return a rate of mini-batches that are 1000 times as short."""
    return lambda without: 1000 * rate(without)


def policy(**changed) -> Policy:
    usual = {
        "name": "test", "rate": steady_rate, "updates": 10, "copy_s": 1.0, "pause_s": 3.0,
        "restart_s": 7.0, "join_s": 0.0, "goes_back": True,
    }  # fmt: skip
    return Policy(**{**usual, **changed})


def share(how: Policy, chance: Failures, horizon_s: float, seed: int = 0) -> float:
    """Return the useful mini-batches, relative to a rate of 0.5 without any failure."""
    done = Run(how, chance).until(horizon_s, chance.events(horizon_s, seed))
    return done.mini_batches / (0.5 * horizon_s)


@pytest.mark.parametrize("restart_s", [0.0, 7.0, 60.0])
@pytest.mark.parametrize("updates", [1, 10, 40])
def test_restarts_cost_what_daly_expects(updates: int, restart_s: float) -> None:
    chance = Failures(1 / 80, 0.0, 0.0, HOSTS)
    simulated = share(policy(updates=updates, restart_s=restart_s), chance, 4e5)
    expected = 1 / expected_s(1.0, updates / 0.5, 1.0, 80.0, restart_s)
    assert simulated == pytest.approx(expected, rel=0.03)


def test_pauses_without_lost_work_cost_their_chance() -> None:
    """A moment is useful if no failure came in the last 3 seconds; mini-batches are short."""
    chance = Failures(1 / 20, 0.0, 0.0, HOSTS)
    how = policy(updates=math.inf, goes_back=False, rate=fast(steady_rate))
    assert share(how, chance, 2e5) / 1000 == pytest.approx(math.exp(-3 / 20), rel=0.01)


def test_devices_are_lost_as_long_as_repairs_take() -> None:
    """Each device fails every 8 * 50 seconds and is away for 100 seconds, on average."""
    chance = Failures(1 / 50, 100.0, 0.0, HOSTS)
    how = policy(rate=fast(without_rate), updates=math.inf, goes_back=False, pause_s=0.0)
    assert share(how, chance, 4e5) / 1000 == pytest.approx(math.exp(-100 / 400), abs=0.01)


def test_each_host_fails_equally_often() -> None:
    """The host of one device fails as often as the host of seven."""
    hosts = [np.arange(1), np.arange(1, 8), np.arange(8, 10)]
    events = [event for event in Failures(1.0, 1.0, 1.0, hosts).events(3e4, 0) if event.fail]
    counts = [sum(event.devices[0] == host[0] for event in events) for host in hosts]
    assert np.array(counts) / len(events) == pytest.approx([1 / 3] * 3, rel=0.03)


def test_each_device_fails_equally_often() -> None:
    hosts = [np.arange(1), np.arange(1, 5)]
    events = [event for event in Failures(1.0, 1.0, 0.0, hosts).events(3e4, 0) if event.fail]
    counts = np.bincount([event.devices.item() for event in events])
    assert counts / len(events) == pytest.approx([1 / 5] * 5, rel=0.04)


def slow_clock(how: Policy, events: list[Event], mtbf_s: float, horizon_s: float) -> float:
    """Return the useful mini-batches by a clock of small steps."""
    tick_s = 0.02
    failed, without = np.zeros(8, int), np.zeros(8, bool)
    copied = since = copying_s = resumes_s = 0.0
    waiting = list(events)
    for now_s in np.arange(0.0, horizon_s, tick_s):
        while waiting and waiting[0].time_s <= now_s:
            event = waiting.pop(0)
            failed[event.devices] += 1 if event.fail else -1
            if event.fail and not without[event.devices].all():
                without = failed > 0
                lost = how.goes_back or how.rate(without) == 0
                since, copying_s = (0.0 if lost else float(int(since + 1e-9))), 0.0
                resumes_s = now_s + (how.restart_s if lost else how.pause_s)
        if now_s < resumes_s:
            continue
        rate, other = how.rate(without), how.rate(failed > 0)
        pause_s = how.join_s if rate else how.restart_s
        pays = other * (mtbf_s - pause_s) > rate * mtbf_s if rate else other > 0
        if ((failed > 0) != without).any() and pays:
            without, resumes_s = failed > 0, now_s + pause_s
        elif since < how.updates:
            since += rate * tick_s
        elif rate:
            copying_s += tick_s
            if copying_s >= how.copy_s:
                copied, since, copying_s = copied + how.updates, 0.0, 0.0
    return copied + since


@pytest.mark.parametrize("goes_back", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_events_agree_with_a_slow_clock(goes_back: bool, seed: int) -> None:
    """Half of the failures take a host, so that at times no device is left."""
    chance = Failures(1 / 60, 60.0, 0.5, HOSTS)
    how = policy(rate=without_rate, updates=4, goes_back=goes_back, join_s=2.0)
    events = chance.events(HORIZON_S, seed)
    done = Run(how, chance).until(HORIZON_S, events).mini_batches
    assert done == pytest.approx(slow_clock(how, events, 60.0, HORIZON_S), rel=0.03)
    assert any(event.fail and len(event.devices) == 4 for event in events)


def lone_failure(mtbf_s: float) -> float:
    """Return the mini-batches until 200 s, of a device that fails at 50 s and returns at 70 s."""
    events = [Event(50.0, np.array([0]), True), Event(70.0, np.array([0]), False)]
    how = policy(rate=without_rate, updates=math.inf, goes_back=False, join_s=5.0)
    return Run(how, Failures(1 / mtbf_s, 20.0, 0.0, HOSTS)).until(200.0, events).mini_batches


def test_a_repaired_device_joins_only_if_that_pays() -> None:
    """A share of 1/8 more for a pause of 5 s pays if the next failure is more than 40 s away."""
    less = 0.5 * 7 / 8
    joined = 25.0 + less * 17 + 0.5 * 125
    assert lone_failure(41.0) == pytest.approx(joined)
    assert lone_failure(39.0) == pytest.approx(25.0 + less * 147)


def test_repaired_devices_join_with_the_next_failure_for_nothing() -> None:
    events = [
        Event(50.0, np.array([0]), True), Event(70.0, np.array([0]), False),
        Event(80.0, np.array([1]), True), Event(85.0, np.array([1]), False),
    ]  # fmt: skip
    how = policy(rate=without_rate, updates=math.inf, goes_back=False, join_s=1000.0)
    done = Run(how, Failures(1e-3, 20.0, 0.0, HOSTS)).until(100.0, events).mini_batches
    less = 0.5 * 7 / 8
    assert done == pytest.approx(math.floor(25.0 + less * 27) + less * 17)


def test_a_failing_device_that_takes_no_part_costs_nothing() -> None:
    events = [Event(50.0, np.array([0]), True), Event(60.0, np.array([0]), True)]
    run = Run(policy(updates=math.inf), Failures(0.01, 1e9, 0.0, HOSTS))
    assert run.until(100.0, events).mini_batches == pytest.approx(0.5 * (100 - 57))


def test_time_is_useful_lost_copied_or_paused() -> None:
    """A copy every 20 s takes 1 s, so the failure at 50 s loses 8 s and pauses for 7 s."""
    run = Run(policy(rate=steady_rate), Failures(0.01, 1e9, 0.0, HOSTS))
    spent = run.until(100.0, [Event(50.0, np.array([0]), True)])
    assert spent.repeated_s == pytest.approx(8)
    assert spent.pauses_s == pytest.approx(7)
    assert spent.copies_s == pytest.approx(4)
    assert spent.mini_batches == pytest.approx(0.5 * (100 - 8 - 7 - 4))


def test_rates_between_plans_are_interpolated_and_never_rise_with_losses() -> None:
    made = rates({0: 1.0, 1: None, 2: 1.25, 4: 0.9}, 8)
    assert made == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates({0: 1.0, 2: 2.0, 3: None}, 4) == pytest.approx([1, 0.75, 0.5, 0, 0])


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    nodes = tuple(
        ProfileNode(f"node{n}", f"Linear{n}", 0.01, 0.02, 4 << 20, 64 << 20) for n in range(12)
    )
    edges = tuple((f"node{n}", f"node{n + 1}") for n in range(11))
    path = tmp_path_factory.mktemp("failures") / "equal.txt"
    write_profile(ProfileGraph(nodes, edges), path)
    return of_profile(path, 16, 128)


@pytest.fixture(scope="module")
def survival(subject: Subject) -> FailureStudy:
    cluster = hosts_of_boards(BOARDS, 2, *LINKS)
    return failures(subject, cluster, RATES, (600.0,), trials=Trials(12.0, 4, 3))


def means(survival: FailureStudy, per_hour: float) -> dict[str, float]:
    return {row.policy: row.mean for row in survival.rows if row.per_hour == per_hour}


def test_without_failures_all_work_is_useful(survival: FailureStudy) -> None:
    ideal = means(survival, 0.0)
    assert ideal.pop(REDUNDANT) == pytest.approx(1 / 1.2)
    assert ideal == {HETPIPE: 1.0, DISK: 1.0, REROUTED: 1.0}
    assert all(row.spread == 0 for row in survival.rows if row.per_hour == 0)


def test_more_failures_cost_more_and_a_restart_costs_the_most(survival: FailureStudy) -> None:
    by_rate = [means(survival, rate) for rate in RATES]
    for name in by_rate[0]:
        shares = [each[name] for each in by_rate]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] < shares[0]
    assert by_rate[1][DISK] < by_rate[1][HETPIPE]
    assert by_rate[2][DISK] < by_rate[2][HETPIPE]


def test_all_time_is_explained(survival: FailureStudy) -> None:
    for row in survival.rows:
        if row.policy != REDUNDANT and row.per_hour == 0:
            assert row.slower == pytest.approx(0, abs=1e-9)
        assert row.slower > -1e-9
        assert min(row.repeated, row.copies, row.pauses) >= (-1e-9 if row.per_hour == 0 else 1e-9)


def test_a_seed_gives_the_same_figures(subject: Subject, survival: FailureStudy) -> None:
    cluster = hosts_of_boards(BOARDS, 2, *LINKS)

    def again(seed: int) -> FailureStudy:
        return failures(subject, cluster, RATES, (600.0,), trials=Trials(12.0, 4, seed))

    assert again(3).to_json() == survival.to_json()
    assert again(4).rows != survival.rows


def test_cheaper_recoveries_lose_less(survival: FailureStudy) -> None:
    def at(**changed: float) -> float:
        how = policies(survival.trained, Assumptions().changed(changed), 600.0)[0]
        chance = Failures(1 / 600, 600.0, 0.1, HOSTS)
        return Run(how, chance).until(40_000.0, chance.events(40_000.0, 0)).mini_batches

    assert at(load_s=60.0) < at() < at(load_s=0.0)
    assert at(copy_Bps=1e8) < at()


def test_rerouted_micro_batches_first_use_idle_time(survival: FailureStudy) -> None:
    trained = survival.trained
    stages, step_s = trained.plan.stages, trained.plan.step_s
    assert min(trained.plan.replicas) > 1

    def step_without(*gone: str, **changed: float) -> float:
        how = policies(trained, Assumptions().changed(changed), math.inf)[2]
        rate = how.rate(np.array([id in gone for id in trained.devices]))
        return 1 / rate if rate else math.inf

    stage = stages[-1]
    part = stage.shares[0] / sum(stage.shares)
    busy_s = trained.plan.microbatches * (stage.forward_s + stage.backward_s)
    idle_s = max(0.0, step_s - busy_s - stage.update_s - stage.all_reduce_s)
    more_s = busy_s * part / (1 - part)
    assert step_without() == pytest.approx(step_s)
    assert step_without(stage.devices[0], bubble_use=0.0) == pytest.approx(step_s + more_s)
    assert step_without(stage.devices[0]) == pytest.approx(step_s + max(0.0, more_s - idle_s))
    assert step_without(*stage.devices) == math.inf


def test_redundant_computing_needs_whole_pipelines_or_neighbours(survival: FailureStudy) -> None:
    def share_without(trained: Trained, *gone: int) -> float:
        without = np.isin(np.arange(len(trained.devices)), gone)
        how = policies(trained, Assumptions(), 600.0)[-1]
        assert how.name == REDUNDANT
        return how.rate(without) * 1.2 * trained.plan.step_s

    two = survival.trained
    assert (len(two.plan.stages), two.pipelines, len(two.devices)) == (4, 2, 8)
    lost = [share_without(two, *range(count)) for count in range(9)]
    assert lost == pytest.approx([1, 0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0])

    stages = [replace(s, devices=s.devices[:1], shares=(1.0,)) for s in two.plan.stages]
    plan = replace(two.plan, stages=tuple(stages))
    one = replace(two, plan=plan, devices=plan.all_devices)
    assert share_without(one) == pytest.approx(1)
    assert share_without(one, 1) == share_without(one, 0, 2) == pytest.approx(0.5)
    assert share_without(one, 0, 1) == share_without(one, 3, 0) == 0


def test_boards_fill_hosts_of_one_kind() -> None:
    cluster = hosts_of_boards({"v100-pcie-16": 3, "a100-40": 2}, 2, *LINKS)
    assert [len(group) for group in cluster.groups()] == [2, 1, 2]
    assert cluster.link("v100-pcie-16.0", "v100-pcie-16.1") == LINKS[0]
    assert cluster.link("v100-pcie-16.0", "a100-40.0") == LINKS[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"detct_s": 1.0}, "no assumption 'detct_s'; did you mean detect_s"),
        ({"detect_s": -1.0}, "detect_s is -1.0: give a finite number of 0 or more"),
        ({"disk_Bps": 0.0}, "disk_Bps is 0.0: give a finite number above 0"),
        ({"host_share": 1.5}, "host_share is 1.5: give a share, from 0 to 1"),
    ],
)
def test_wrong_assumptions_are_refused(changed: dict[str, float], message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        Assumptions().changed(changed)


DATA = Path(__file__).parents[2] / "data" / "importers" / "metis.json"
STUDY = ("failures", "--profile", str(DATA), "--samples", "8", "--cut-nbytes", "4096")


def test_the_command_prints_every_assumption(tmp_path: Path) -> None:
    file = tmp_path / "failures.json"
    done = CliRunner().invoke(
        app,
        [
            *STUDY, "--boards", "v100-pcie-16=4", "--per-host", "2", "--hours", "1", "--repeats",
            "2", "--assume", "detect_s=1.5,load_s=3", "--json", str(file),
        ],
        env={"COLUMNS": "200"},
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for name, value, meaning in Assumptions(detect_s=1.5, load_s=3.0).rows():
        row = next(line for line in done.stdout.splitlines() if f"│ {name} " in line)
        assert f"{value:g} " in row
        assert meaning in row
    written = json.loads(file.read_text())
    assert written["label"] == "modelled"
    assert written["assumptions"]["detect_s"] == 1.5
    assert {row["per_hour"] for row in written["rows"]} == {1.0, 4.0, 12.0, 60.0}
    assert all(0 <= row["mean"] <= 1 for row in written["rows"])


def test_no_interval_is_printed_without_failures() -> None:
    options = ("--boards", "v100-pcie-16=2", "--per-hour", "0", "--hours", "1", "--repeats", "1")
    done = CliRunner().invoke(app, [*STUDY, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "100.0 % ± 0.0" in done.stdout
    assert "intervals" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--assume", "detect_s"), "--assume 'detect_s': write NAME=NUMBER"),
        (("--per-hour", "often"), "--per-hour 'often': separate numbers from 0 to 1e+06"),
        (("--per-hour", "1e9"), "--per-hour '1e9': separate numbers from 0 to 1e+06"),
        (("--boards", "v100-pcie-16=1.5"), "1.5 boards v100-pcie-16: give a whole number"),
        (("--boards", "a100-40=8", "--cluster", "pipedream-a"), "give one of them"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, [*STUDY, *options])
    assert isinstance(done.exception, HetpipeError)
    assert message in str(done.exception)
