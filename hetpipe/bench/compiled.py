"""torch.compile as a rival: training steps whose forward, loss and backward inductor compiles."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hetpipe.bench.eager import Eager, Tree
from hetpipe.optim.rule import Optimizer

CACHE = "TORCHINDUCTOR_CACHE_DIR"
BACKEND = "inductor"


@dataclass(frozen=True)
class Compiled:
    """A step with the seconds on the clock that its first run took, or the reason for none."""

    step: Callable[[], float] | None = None
    compile_s: float | None = None
    why_not: str = ""


@contextmanager
def compiled(
    model: torch.nn.Module,
    loss_fn: Callable[..., object],
    rule: Optimizer,
    batch: tuple[Tree, Tree],
    samples: int,
) -> Iterator[Compiled]:
    """The step, from an empty cache; the optimizer is torch's own, as in eager training.

    The model is copied. A machine without a C++ compiler, and what torch cannot compile, is told.
    """
    if why_not := _lacks_compiler():
        yield Compiled(why_not=why_not)
        return
    with tempfile.TemporaryDirectory() as folder, _variable(CACHE, folder):
        torch._dynamo.reset()
        model = copy.deepcopy(model)
        model.compile(backend=BACKEND)
        eager = Eager(model, torch.compile(loss_fn, backend=BACKEND), rule)

        def step() -> float:
            return eager.step(*batch, [samples])

        begin_s = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dynamo looks at gradients that are not there
                step()
        except Exception as error:  # dynamo and inductor raise whatever went wrong in them
            yield Compiled(why_not=f"{type(error).__name__}: {error}".splitlines()[0])
            return
        yield Compiled(step, time.perf_counter() - begin_s)


def _lacks_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler: inductor needs g++ or clang++"
    return ""


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A variable of the environment for the time of the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
