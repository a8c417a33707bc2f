"""Number of operators that the torch backend launches for each program of a model.

    PYTHONPATH=tests python -m benchmarks.operatorcounts [--list] DEVICE MODEL...

DEVICE is a device type of torch such as `cpu` or `cuda`. The machine needs no such device: each
program calls the kernels of that type on meta tensors, which have no memory. The command counts the
operators that torch dispatches, except views and allocations. On a card each of them is at least
one launch. An operator of `_foreach` counts as one, although CUDA starts a kernel for each 320
chunks of 65536 elements. `--list` prints the operators of each program by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from hetpipe.backends.pytorch.program import Program
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe.capture.captured import Captured
from hetpipe.capture.program import GRAD, PARAM, SAVED, STATE
from hetpipe.capture.program import Program as Captures
from hetpipe.sdk.host.registry import decompositions_of
from hetpipe.sdk.operators.custom import function_of
from hetpipe.zoo.load import load_workload, optimizer_of

NO_LAUNCH = frozenset((
    "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "promote_types",
))  # fmt: skip
"""Operators that allocate memory or compute a shape or dtype, so they start no kernel."""
FURTHER = {"_native_batch_norm_legit_functional": 2}
"""Further launches inside an operator: the copies of the running mean and variance."""
DONATED = {"forward": (), "backward": (SAVED, GRAD), "update": (PARAM, GRAD, STATE)}
"""The programs of a training step, and the roles of the inputs that each may overwrite."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are dispatched in its context, except views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (python := function_of(func)) is not None:
            with self:  # count the operators that hetpipe's function calls
                return python(*args, **(kwargs or {}))
        name = str(func._schema.name).rpartition("::")[2]
        if not func.is_view and name not in NO_LAUNCH:
            self.names[name] += 1 + FURTHER.get(name, 0)
        return func(*args, **(kwargs or {}))


def launches(program: Captures, roles: tuple[str, ...], device: str) -> Counter[str]:
    """Count the operators of a program that may overwrite the inputs with these roles."""
    donate = frozenset(i for i, slot in enumerate(program.inputs) if slot.role in roles)
    compiled = Program(program.graph, donate, torch.device("meta"), device, device)
    counted = Launches()
    with torch.no_grad(), counted:
        compiled.call([
            torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
            for slot in program.inputs
        ])  # fmt: skip
    return counted.names


def programs(model: str) -> dict[str, Captures]:
    """Return the programs of a model of the zoo as one stage with one micro-batch."""
    workload = load_workload(model)
    batch = next(workload.batches(workload.mini_batch, 0))
    captured = Captured(workload.model, workload.loss_fn, batch)
    (graphs,) = captured.stage_graphs(
        [], [decompositions_of("pytorch")], [workload.mini_batch], optimizer_of(workload), extras=()
    )
    (passes,) = graphs.passes.values()
    assert passes.backward is not None
    assert graphs.update is not None
    return {"forward": passes.forward, "backward": passes.backward, "update": graphs.update}


def main(device: str, models: list[str], listed: bool) -> None:
    """Print a line for each model, and if asked its operators."""
    print("| operators on", device, "|", " | ".join(DONATED), "|")
    print("|---" * (1 + len(DONATED)) + "|")
    for model in models:
        counts = {
            name: launches(program, DONATED[name], device)
            for name, program in programs(model).items()
        }
        print("|", model, "|", " | ".join(str(c.total()) for c in counts.values()), "|")
        for name, count in counts.items() if listed else ():
            print(f"  {name}:", ", ".join(f"{n} {k}" for k, n in count.most_common()))


if __name__ == "__main__":
    _arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    main(_arguments[0], _arguments[1:], "--list" in sys.argv)
