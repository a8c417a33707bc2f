"""Workloads by name: the zoo's own, or `package.module:factory` of the user's."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer

ZOO = {
    "digits": "hetpipe.zoo.digits:workload",
    "mlp": "hetpipe.zoo.mlp:workload",
    "gpt": "hetpipe.zoo.gpt:workload",
    "lstm": "hetpipe.zoo.lstm:workload",
}


def load_workload(name: str) -> Workload:
    """The workload of that name, or what the factory `package.module:factory` returns.

    Modules are looked for in the working directory too. Raises `HetpipeError` if there is none.
    """
    target = ZOO.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise HetpipeError(
            f"no model {name!r}; write one of {', '.join(ZOO)}, or package.module:factory"
        )
    try:
        sys.path.insert(0, "")
        factory = getattr(import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise HetpipeError(
            f"model {name!r}: no module {error.name!r}; start hetpipe where it can be imported"
        ) from error
    finally:
        sys.path.remove("")
    if not callable(factory):
        raise HetpipeError(f"model {name!r}: {module_name} has no function {attribute!r}")
    made = factory()
    if not isinstance(made, Workload):
        raise HetpipeError(
            f"model {name!r}: {attribute}() returned {type(made).__name__}; "
            "return hetpipe.Workload(model, loss_fn, batches)"
        )
    return made


def optimizer_of(workload: Workload) -> Optimizer:
    """The workload's own optimizer, or SGD with momentum."""
    from hetpipe import optim

    chosen: Optimizer = workload.optimizer or optim.sgd(lr=0.05, momentum=0.9)
    return chosen
