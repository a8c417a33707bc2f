"""Compiles programs with torch's Inductor: C++ kernels for the CPU, Triton kernels for cards.

Inductor gets the trace of the eager program, with the program's writes into donated inputs. So a
compiled program overwrites the same inputs as the eager program, and needs no further memory for
gradients, parameters or optimizer state. Compiling takes seconds to minutes, loading a compiled
program a tenth of a second.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hetpipe.caches import cache_folder, temporary

from .program import Program, Way, home_of

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of Inductor's own cache: compiled kernels."""

Homes = tuple[int | None, ...]
"""For each new tensor of a program, the donated input whose storage it has; None for others."""

_turn = threading.Lock()  # Inductor compiles for one thread at a time


def compile_program(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[Way, bytes]:
    """Compile a program for inputs like `tensors`, whose values are not read.

    Return the compiled program, and bytes from which `load_program` restores it in a process with
    the same torch; empty bytes if torch cannot store the program. Raises torch's errors.
    """
    with _settings():
        from torch._inductor import standalone_compile

        graph, homes = _trace(program, tensors)
        examples: list[Any] = [torch.empty_like(tensor) for tensor in tensors]
        artifact = standalone_compile(graph, examples, dynamic_shapes="from_example_inputs")
        del examples
        return _way(artifact, homes, program), _dump(artifact, homes)


def load_program(data: bytes, program: Program) -> Way:
    """Restore the compiled form of `program` from bytes of this user's cache.

    Kernels that are missing in Inductor's own cache are compiled again.
    """
    homes, content = pickle.loads(data)
    with _settings(), _file() as path:
        from torch._inductor.standalone_compile import CompiledArtifact

        path.write_bytes(content)
        return _way(CompiledArtifact.load(path=str(path)), homes, program)


def _way(artifact: Any, homes: Homes, program: Program) -> Way:
    shapes = [shape for shape, _ in program.forms]

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fresh = iter(artifact(*tensors))
        return [
            next(fresh) if home is None else tensors[home].view(shape)
            for home, shape in zip(homes, shapes, strict=True)
        ]

    return call


def _trace(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, Homes]:
    """Return the operators that a program calls, and the homes of its results.

    The graph overwrites inputs as the program does, and returns the results without a home.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), FakeTensorMode():

        def fakes() -> list[torch.Tensor]:
            return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]

        inputs, call = fakes(), program.functional()
        homes = tuple(home_of(result, inputs) for result in call(inputs))

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            results = zip(call(given), homes, strict=True)
            return [result for result, home in results if home is None]

        return make_fx(run)(*fakes()), homes


def _dump(artifact: Any, homes: Homes) -> bytes:
    with _file() as path:
        try:
            artifact.save(path=str(path))
        except RuntimeError:  # the graph has an operator that torch does not store
            return b""
        return pickle.dumps((homes, path.read_bytes()))


@contextmanager
def _file() -> Iterator[Path]:
    """Yield a path in a private folder that exists within the context."""
    with tempfile.TemporaryDirectory(dir=temporary()) as folder:
        yield Path(folder) / "program"


@contextmanager
def _settings() -> Iterator[None]:
    """Let Inductor compile in this process and thread, and keep kernels in hetpipe's caches.

    Inductor's pool of processes would outlive a worker that is killed. By default Inductor's cache
    is in a folder of /tmp whose name another user can take.
    """
    with _turn:
        import torch._inductor.config as config
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if os.environ.get(FOLDER, default_cache_dir()) == default_cache_dir():
            os.environ[FOLDER] = str(cache_folder("inductor"))

        with config.patch(compile_threads=1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Inductor's advice on other settings
            yield
