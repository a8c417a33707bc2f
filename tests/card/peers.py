"""Messages between two workers on cards: windows, copies from card to card, and the host's way."""

from __future__ import annotations

import statistics
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.steprates import in_turns
from hetpipe.backends.pytorch import PyTorchBackend

from card.setting import Setting, Skipped, Wrong
from card.training import (
    MICROBATCHES,
    MINI_BATCH,
    PACE_MODEL,
    SAMPLES,
    captured_of,
    compared,
)
from hetpipe.bench.inturn import even_cuts
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import BackendOptions
from hetpipe.conformance.check import Level
from hetpipe.conformance.run import run_suite
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.host.registry import (
    configure_backend,
    devices_of,
    forget_options,
    open_device,
    register_backend,
)
from hetpipe.train.training import open_pipeline
from hetpipe.wire.sharedmemory import WindowWarning
from hetpipe.zoo.load import load_workload

DIRECT, HOST_WAY = "peer copies", "through the host"


class PeerCards(PyTorchBackend):  # type: ignore[misc] # mypy sees no `hetpipe.backends`
    """torch's devices with peer copies, for the conformance suite, which sets no options."""

    name = "peer-cards"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"peer_copies": True}, Path())


def windows(setting: Setting) -> None:
    """Run the checks of windows in the conformance suite, with peer copies."""
    register_backend(PeerCards)
    try:
        infos = {info.id: info for info in devices_of(PeerCards.name)}
    except BackendError as error:
        raise Skipped(str(error)) from error
    info = infos[f"{PeerCards.name}:{setting.torch_name}"]
    results = list(run_suite(info, Level.CORE, groups=["windows"]))
    if all(result.outcome == "skipped" for result in results):
        raise Skipped(results[0].message)
    setting.keep(outcomes={result.name: result.outcome for result in results})
    if failed := [f"{result.name}: {result.text}" for result in results if result.failed]:
        raise Wrong("; ".join(failed))


def peers(setting: Setting) -> None:
    """Train two workers with peer copies and without: compare with torch, and time in turns.

    The workers are on two cards, or both on the only card.
    """
    _require_windows(setting)
    torch.set_num_threads(1)
    workload = load_workload("gpt2-small" if setting.quick else PACE_MODEL)
    captured = captured_of(workload)
    count = torch.accelerator.device_count() if setting.is_card else 0
    second = f"{setting.device.rpartition(':')[0]}:1" if count > 1 else setting.device
    pair = replace(Cluster.local(devices=[setting.device, second]), transport="shared-memory")
    with ExitStack() as stack:
        pipes = {}
        for name, direct in ((DIRECT, True), (HOST_WAY, False)):
            cluster = replace(pair, options=_options(setting, direct))
            crew = stack.enter_context(Crew.start(cluster))
            crew.call([*cluster.ids], "card.peers:forbid_detours")
            pipes[name] = stack.enter_context(
                open_pipeline(
                    workload, cluster, crew=crew, mini_batch=MINI_BATCH, captured=captured,
                    cuts=even_cuts(captured, SAMPLES, 2), microbatches=MICROBATCHES,
                    schedule="1f1b",
                )
            )  # fmt: skip
        results = {name: compared(setting, name, workload, pipe) for name, pipe in pipes.items()}
        batch = next(workload.batches(MINI_BATCH, 0))
        steps = {name: partial(_step, pipe, batch) for name, pipe in pipes.items()}
        times_s = in_turns(steps, *((0.3, 3) if setting.quick else (1.0, 7)))
    setting.keep(
        step_s={name: statistics.median(each) for name, each in times_s.items()},
        spread={name: spread_of(each) for name, each in times_s.items()},
        host_over_peer=statistics.median(
            host_s / peer_s
            for host_s, peer_s in zip(times_s[HOST_WAY], times_s[DIRECT], strict=True)
        ),
    )
    if unequal := [f"{name} {each}" for name, each in results.items() if not each.equal]:
        raise Wrong("; ".join(unequal))


def forbid_detours(device: Any) -> None:
    """Make it an error if messages pass through the host for lack of a window; in a worker."""
    warnings.simplefilter("error", WindowWarning)


def _options(setting: Setting, direct: bool) -> dict[str, BackendOptions]:
    backend = setting.device.partition(":")[0]
    return {backend: BackendOptions({"peer_copies": direct}, setting.folder)}


def _require_windows(setting: Setting) -> None:
    """Raise `Skipped` unless the device opens windows, and the backend's error if that fails."""
    for backend, options in _options(setting, True).items():
        configure_backend(backend, options.values, options.folder)
        try:
            device = open_device(setting.device)
        except BackendError as error:
            raise Skipped(str(error)) from error
        finally:
            forget_options(backend)
        if device.open_window(1) is None:
            raise Skipped(f"{setting.device} opens no window for messages of other processes")
        device.close()


def _step(pipe: Any, batch: tuple[Any, Any]) -> float:
    return float(pipe.step(*batch))
