"""The suite names the fault of every broken backend and finds none in the sound one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from as_card import AsCard, AsPeer, AsSummed
from broken import FAULTS, Fault, FlushesDenormals, FreesLater, results_of
from broken_groups import Unsummable
from sound import SoundBackend

from hetpipe.conformance.check import Level
from hetpipe.conformance.run import checks_of, rig_of, run_check, run_suite
from hetpipe.sdk import Capabilities
from hetpipe.sdk.host import registry


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))


COUNTERS = ("memory/counter", "memory/available")
"""Checks of optional methods that a sound backend lacks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.conformance.held.PATIENCE_S", 0.2)
    monkeypatch.setattr("hetpipe.conformance.rig.WAIT_S", 10.0)
    fault = FAULTS[name]
    (result,) = results_of(fault, [fault.check], Level.TRAINING)
    assert result.outcome == "failed", result
    assert fault.words in result.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "sound",
    [
        Fault(FlushesDenormals, "values/denormals", "", Capabilities(flushes_denormals=True)),
        Fault(FreesLater, "memory/no leaks", ""),
        Fault(FreesLater, "memory/counter", ""),
    ],
    ids=lambda sound: sound.device.__name__,
)
def test_declared_limits_and_late_frees_are_no_faults(sound: Fault) -> None:
    (result,) = results_of(sound, [sound.check])
    assert result.outcome == "passed", result


@pytest.mark.slow
def test_a_simulated_card_breaks_no_rule() -> None:
    registry.register_backend(AsCard)
    (info,) = registry.devices_of("as-card")
    results = list(run_suite(info, Level.CORE))  # in another process: a check counts memory
    assert [result for result in results if result.failed] == []
    passed = {result.name for result in results if result.outcome == "passed"}
    assert {"lengths/wide convolution", "values/index out of range"} <= passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "outcome"),
    [
        (AsCard, ("skipped", "the device opens no window: messages pass through the host")),
        (AsPeer, ("passed", "")),
    ],
)
def test_windows_of_a_simulated_card(
    backend: type[AsCard], outcome: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # files stand for memory of the card
    registry.register_backend(backend)
    (info,) = registry.devices_of(backend.name)
    results = list(run_suite(info, Level.CORE, groups=["windows"]))
    assert {(result.outcome, result.message) for result in results} == {outcome}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "outcome"),
    [
        (AsCard, ("skipped", "the device joins no group: the host sums")),
        (AsSummed, ("passed", "")),
    ],
)
def test_groups_of_simulated_cards(backend: type[AsCard], outcome: tuple[str, str]) -> None:
    registry.register_backend(backend)
    info = registry.devices_of(backend.name)[0]
    results = list(run_suite(info, Level.CORE, groups=["groups"]))
    assert {(result.outcome, result.message) for result in results} == {outcome}


def test_an_only_device_may_refuse_a_group() -> None:
    (result,) = results_of(Fault(Unsummable, "groups/sums", ""), ["groups/sums"])
    assert result.outcome == "skipped"
    assert result.message == "the backend's only device joins no group: two ranks on one card"


def test_devices_with_separate_memories_may_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = SoundBackend().discover()
    devices = [
        replace(only, id=f"broken:unit:{n}", backend="broken", memory_domain=f"unit:{n}")
        for n in range(2)
    ]
    monkeypatch.setattr(SoundBackend, "discover", lambda self: devices)
    (result,) = results_of(Fault(Unsummable, "groups/sums", ""), ["groups/sums"])
    assert result.outcome == "failed"
    assert result.message == "BackendError: two ranks on one card"


@pytest.mark.slow
def test_a_sound_backend_breaks_no_rule() -> None:
    registry.register_backend(SoundBackend)
    rig = rig_of("sound:unit:0")
    results = [run_check(each, rig) for each in checks_of(Level.CORE)]
    assert [result for result in results if result.failed] == []
    passed = [result.name for result in results if result.outcome == "passed"]
    named = {fault.check for fault in FAULTS.values()}
    core = {each.name for each in checks_of(Level.CORE)}
    assert named & core <= {*passed, "chunks/parts of results", *COUNTERS}
