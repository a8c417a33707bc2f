"""An option of torch's backend, on and off: trainings beside torch's, with steps in turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
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
from hetpipe.conformance.groups import partner_of
from hetpipe.conformance.run import run_suite
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.registry import (
    configure_backend,
    devices_of,
    forget_options,
    open_device,
    register_backend,
)
from hetpipe.train.training import open_pipeline
from hetpipe.zoo.load import load_workload

HOST_WAY = "through the host"


@contextmanager
def opened(setting: Setting, option: str) -> Iterator[Device]:
    """Open the device with an option. Raises `Skipped` if torch cannot do what it demands."""
    for backend, options in _options(setting, option, True).items():
        configure_backend(backend, options.values, options.folder)
        try:
            device = open_device(setting.device)
        except BackendError as error:
            raise Skipped(str(error)) from error
        finally:
            forget_options(backend)
    yield device
    device.close()


def run_checks(setting: Setting, backend: type[PyTorchBackend], group: str) -> None:
    """Run a group of checks of the conformance suite on the card, as a device of `backend`."""
    register_backend(backend)
    try:
        infos = {info.id: info for info in devices_of(backend.name)}
    except BackendError as error:
        raise Skipped(str(error)) from error
    info = infos[f"{backend.name}:{setting.torch_name}"]
    results = list(run_suite(info, Level.CORE, groups=[group]))
    if all(result.outcome == "skipped" for result in results):
        raise Skipped(results[0].message)
    setting.keep(outcomes={result.name: result.outcome for result in results})
    if failed := [f"{result.name}: {result.text}" for result in results if result.failed]:
        raise Wrong("; ".join(failed))


def compare_ways(
    setting: Setting, option: str, name: str, prepare: str, stages: int, schedule: str
) -> None:
    """Train two workers with an option and without it: compare with torch, and time in turns.

    The workers are on two cards, or both on the only card. `prepare` is a function that the workers
    with the option call before the training.
    """
    torch.set_num_threads(1)
    workload = load_workload("gpt2-small" if setting.quick else PACE_MODEL)
    captured = captured_of(workload)
    pair = replace(Cluster.local(devices=pair_of(setting)), transport="shared-memory")
    cuts = even_cuts(captured, SAMPLES, stages)
    plan: dict[str, Any] = {"cuts": cuts, "microbatches": MICROBATCHES, "schedule": schedule}
    with ExitStack() as stack:
        pipes = {}
        for way, is_on in ((name, True), (HOST_WAY, False)):
            cluster = replace(pair, options=_options(setting, option, is_on))
            crew = stack.enter_context(Crew.start(cluster))
            if is_on:
                crew.call([*cluster.ids], prepare)
            pipes[way] = stack.enter_context(
                open_pipeline(
                    workload, cluster, crew=crew, mini_batch=MINI_BATCH, captured=captured, **plan
                )
            )
            plan = {"plan": pipes[way].plan}  # replicas have the same shares in both trainings
        results = {way: compared(setting, way, workload, pipe) for way, pipe in pipes.items()}
        batch = next(workload.batches(MINI_BATCH, 0))
        steps = {way: partial(_step, pipe, batch) for way, pipe in pipes.items()}
        times_s = in_turns(steps, *((0.3, 3) if setting.quick else (1.0, 7)))
    setting.keep(
        step_s={way: statistics.median(each) for way, each in times_s.items()},
        spread={way: spread_of(each) for way, each in times_s.items()},
        host_over_direct=statistics.median(
            host_s / direct_s
            for host_s, direct_s in zip(times_s[HOST_WAY], times_s[name], strict=True)
        ),
    )
    if unequal := [f"{way} {each}" for way, each in results.items() if not each.equal]:
        raise Wrong("; ".join(unequal))


def pair_of(setting: Setting) -> list[str]:
    """Return the device and another card, or the device twice."""
    backend = setting.device.partition(":")[0]
    (info,) = (info for info in devices_of(backend) if info.id == setting.device)
    return [setting.device, partner_of(info)]


def _options(setting: Setting, option: str, is_on: bool) -> dict[str, BackendOptions]:
    backend = setting.device.partition(":")[0]
    return {backend: BackendOptions({option: is_on}, setting.folder)}


def _step(pipe: Any, batch: tuple[Any, Any]) -> float:
    return float(pipe.step(*batch))
