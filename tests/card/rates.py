"""Steady steps of one stage on the device, beside torch eager and torch.compile."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.compiled import compiled
from benchmarks.eagermemory import peak_nbytes
from benchmarks.steprates import Trained, in_turns
from torch import nn
from torch.utils._pytree import tree_map

from card.setting import Setting
from hetpipe.bench.machine import keep_memory
from hetpipe.capture.precision import Precision
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.host.registry import configure_backend, open_device
from hetpipe.train.eager import Eager
from hetpipe.zoo.load import SMALL, load_workload, optimizer_of


class Autocast(nn.Module):
    """A model or a loss whose forward torch computes in half precision."""

    def __init__(self, function: Callable[..., Any], kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self._how = kind, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._how):
            return self.function(*args, **kwargs)


class Memory:
    """Peak bytes of torch's allocator on an accelerator since this object was made, more than
    before."""

    def __init__(self, setting: Setting) -> None:
        self._device = torch.device(setting.torch_name)
        self._before = 0
        if setting.is_card:
            torch.accelerator.empty_cache()
            self._before = torch.accelerator.memory_allocated(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)

    @property
    def nbytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device)) - self._before


def rate(setting: Setting, model: str, samples: int, dtype: str, rivals: bool = True) -> None:
    """Time steps in turns, and keep medians, ratios, spreads, losses and memory.

    Each contender copies the mini-batch from the host in every step, and every step ends with a
    wait for the device. Products and convolutions in float32 use no TF32. Without `rivals`, a quick
    run omits all contenders whose compilation takes long.
    """
    torch.backends.cudnn.allow_tf32 = False
    if not setting.is_card:
        torch.set_num_threads(1)
    keep_memory()
    rivals = rivals or not setting.quick
    if setting.quick:
        model, samples = model + SMALL, 4
    setting.keep(model=model, samples=samples)
    workload = load_workload(model)
    batch = next(workload.batches(samples, 0))
    half = dtype != "float32"
    trained = Trained(workload, batch, Precision(dtype if half else None))
    contenders: dict[str, Callable[[], object]] = {}
    for compile in ("eager",) if setting.quick else ("eager", "measured"):
        configure_backend("pytorch", {"compile": compile}, setting.folder)
        contenders[f"hetpipe, {compile}"] = _loaded(setting, copy.copy(trained), compile)

    place = torch.device(setting.torch_name)
    moved, loss_fn = copy.deepcopy(workload.model).to(place), workload.loss_fn
    if half:
        moved = Autocast(moved, setting.kind, getattr(torch, dtype))
        loss_fn = Autocast(loss_fn, setting.kind, getattr(torch, dtype))
    eager = Eager(moved, loss_fn, optimizer_of(workload))
    contenders["torch eager"] = theirs = _fed(setting, eager, batch, samples)
    x, y = tree_map(lambda tensor: tensor.to(place), batch)
    peak = Memory(setting)
    losses = [theirs(), theirs()]
    nbytes = peak.nbytes if setting.is_card else peak_nbytes(eager, x, y, samples)
    setting.keep(torch={"losses": losses, "memory_nbytes": nbytes})
    size = (0.3, 3) if setting.quick else (1.0, 7)
    if not rivals:
        setting.keep(**_figures(in_turns(contenders, *size)))
        return
    with compiled(moved, loss_fn, optimizer_of(workload), (x, y), samples) as rival:
        setting.keep(compile_s=rival.compile_s, not_compiled=rival.why_not)
        if rival.eager is not None:
            contenders["torch.compile"] = _fed(setting, rival.eager, batch, samples)
        setting.keep(**_figures(in_turns(contenders, *size)))


def _loaded(setting: Setting, trained: Trained, compile: str) -> Callable[[], float]:
    """Load the stage, run two steps, keep losses and memory, and return the step."""
    device = open_device(setting.device)
    trained.trace(device)
    peak, begin_s = Memory(setting), time.perf_counter()
    trained.load(device)

    def step() -> float:
        loss = trained.step()
        _synchronize(setting)
        return loss

    losses = [step(), step()]
    found = {"losses": losses, "load_s": time.perf_counter() - begin_s}
    nbytes = peak.nbytes if setting.is_card else device.memory_used_nbytes()
    setting.keep(**{f"hetpipe, {compile}": {**found, "memory_nbytes": nbytes}})
    return step


def _fed(setting: Setting, eager: Eager, batch: Any, samples: int) -> Callable[[], float]:
    """Return a step of torch that copies the mini-batch to the device and waits for the end."""
    place = torch.device(setting.torch_name)

    def step() -> float:
        x, y = tree_map(lambda tensor: tensor.to(place), batch)
        loss = eager.step(x, y, [samples])
        _synchronize(setting)
        return loss

    return step


def _synchronize(setting: Setting) -> None:
    if setting.is_card:
        torch.accelerator.synchronize(torch.device(setting.torch_name))


def _figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and spreads, and the speeds of hetpipe relative to torch's.

    A relative speed is the median of the ratios within each round. At 2, hetpipe takes half of the
    time. `of_the_better` compares the best of both sides.
    """
    theirs = {name: each for name, each in times.items() if name.startswith("torch")}
    speeds = {
        name: {
            other: statistics.median(t / o for t, o in zip(rounds, each, strict=True))
            for other, rounds in theirs.items()
        }
        for name, each in times.items()
        if name not in theirs
    }
    return {
        "step_s": {name: statistics.median(each) for name, each in times.items()},
        "spread": {name: spread_of(each) for name, each in times.items()},
        "relative_speed": speeds,
        "of_the_better": max(min(each.values()) for each in speeds.values()),
    }
