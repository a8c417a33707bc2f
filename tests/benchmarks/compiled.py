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

from hetpipe.optim.rule import Optimizer
from hetpipe.train.eager import Eager, Tree

CACHE = "TORCHINDUCTOR_CACHE_DIR"
BACKEND = "inductor"


@dataclass(frozen=True)
class Compiled:
    """A compiled training, a step of it on the given batch, and the wall-clock seconds of the first
    run; or the reason why they are None."""

    eager: Eager | None = None
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
    """Compile a step with an empty cache; the optimizer is not compiled, as in eager training.

    The step trains a copy of the model. Without a C++ compiler, or if torch cannot compile the
    step, the result has only the reason.
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
                warnings.simplefilter("ignore")  # dynamo reads missing gradients and warns
                step()
        except Exception as error:  # dynamo and inductor may raise anything
            yield Compiled(why_not=f"{type(error).__name__}: {error}".splitlines()[0])
            return
        yield Compiled(eager, step, time.perf_counter() - begin_s)


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
    """Set an environment variable within the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
