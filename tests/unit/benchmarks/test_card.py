"""`python -m tests.card` runs its steps in separate processes, and reports each failure."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from as_card import AsCard, AsPeer, AsSummed
from card import run
from card.peers import peers
from card.setting import Setting
from card.steps import STEPS, Step
from card.sums import replicas
from hetpipe.backends.pytorch.device import TorchDevice

from hetpipe.errors import HetpipeError
from hetpipe.sdk import DeviceInfo
from hetpipe.sdk.host import registry

ROOT = Path(__file__).parents[3]
FAULTY = """
import os, signal, time
from card.setting import Skipped, Wrong

def fails(setting, kind):
    setting.keep(sum=3)
    if kind == "lacks":
        raise Skipped("no second card")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hangs":
        time.sleep(1000)
    raise Wrong("the sum is 3")
"""


class Unreachable(AsPeer):
    """A card that opens windows, but cannot reach the window of another process."""

    name = "unreachable"

    def open(self, info: DeviceInfo) -> TorchDevice:
        device: Any = super().open(info)
        device.mapped_memory = _refuse
        return device


class Unsummed(AsSummed):
    """Cards that leave sums to the host."""

    name = "unsummed"

    def open(self, info: DeviceInfo) -> TorchDevice:
        device: Any = super().open(info)
        device.join_group = lambda *_: None
        return device


def _refuse(handle: bytes, nbytes: int) -> torch.Tensor:
    raise RuntimeError("peer access is not supported between these two devices")


def record_of(kind: str, folder: Path, limit_s: float) -> dict[str, Any]:
    step = Step("faulty", "faulty_card_steps:fails", limit_s, (kind,))
    return run.run(step, "pytorch:cpu:0", True, folder, limit_s, folder / "cache")


@pytest.fixture(autouse=True)
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_card_steps.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "outcome", "text"),
    [
        ("raises", "failed", "Wrong: the sum is 3"),
        ("dies", "crashed", "the process ended with signal 11"),
        ("lacks", "skipped", "no second card"),
        pytest.param("hangs", "late", "not done after 6 s", marks=pytest.mark.slow),
    ],
)
def test_a_failed_step_keeps_its_figures(
    tmp_path: Path, kind: str, outcome: str, text: str
) -> None:
    record = record_of(kind, tmp_path, 6.0 if kind == "hangs" else 60.0)
    assert (record["outcome"], record["text"]) == (outcome, text)
    assert record["figures"] == {"sum": 3}


def test_a_step_does_not_start_when_the_time_is_over(tmp_path: Path) -> None:
    assert record_of("raises", tmp_path, 1.0)["outcome"] == "not run"


def test_every_step_names_a_function() -> None:
    """Only a run on a card calls all functions in full, so a wrong name would be found late."""
    from importlib import import_module

    for step in STEPS:
        module, _, name = step.function.partition(":")
        assert callable(getattr(import_module(module), name)), step.name


def setting_of(backend: type[AsCard], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setenv("TMPDIR", str(folder))  # files stand for memory of cards
    monkeypatch.setattr(tempfile, "tempdir", None)
    for known in ("_registered", "_instances"):
        monkeypatch.setattr(registry, known, dict(getattr(registry, known)))
    registry.register_backend(backend)
    return Setting("peer-copies", backend().discover()[0].id, True, folder)


@pytest.mark.slow
def test_a_simulated_card_trains_with_peer_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(AsPeer, tmp_path, monkeypatch)
    peers(setting)
    assert setting.figures["host_over_direct"] > 0
    windows = [path.read_bytes() for path in tmp_path.glob("window-*")]
    assert len([window for window in windows if any(window)]) == 2, "one for each direction"


@pytest.mark.slow
def test_messages_that_pass_through_the_host_fail_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HetpipeError, match="peer access is not supported"):
        peers(setting_of(Unreachable, tmp_path, monkeypatch))


@pytest.mark.slow
def test_simulated_cards_train_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_of(AsSummed, tmp_path, monkeypatch)
    replicas(setting)
    assert setting.figures["host_over_direct"] > 0
    assert setting.figures["NCCL"]["devices"] == ["as-summed:cpu:0", "as-summed:cpu:1"]


@pytest.mark.slow
def test_sums_on_the_host_fail_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HetpipeError, match="joins no group, so the host sums"):
        replicas(setting_of(Unsummed, tmp_path, monkeypatch))


@pytest.mark.slow
def test_steps_on_the_processor(tmp_path: Path) -> None:
    """The checkout is the current folder, where Python finds no `hetpipe.backends`."""
    command = [sys.executable, "-m", "tests.card", "--out", str(tmp_path), "--quick"]
    chosen = [
        "--device",
        "pytorch:cpu:0",
        "--only",
        "versions",
        "--only",
        "memory",
        "--only",
        "windows",
        "--only",
        "peer-copies",
        "--only",
        "groups",
        "--only",
        "replicas",
        "--patience",
        "5",
    ]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "card.json").read_text())
    assert written["passed"] is True
    versions, memory, *skipped = written["steps"]
    assert versions["figures"]["software"]["torch"]
    assert "uploading 3221225472 bytes failed" in memory["figures"]["errors"]["upload"]
    assert {step["outcome"] for step in skipped} == {"skipped"}
    assert ["window" in step["text"] for step in skipped] == [True, True, False, False]
    assert ["only card" in step["text"] for step in skipped] == [False, False, True, True]
