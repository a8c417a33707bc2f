"""Loads workloads by name: the zoo's, or a user's `package.module:factory`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetpipe.errors import HetpipeError
from hetpipe.words import near
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer

FAMILIES = {
    "vgg": ("alexnet", "vgg11", "vgg16", "vgg19"),
    "resnet": ("resnet18", "resnet50", "resnet101"),
    "inception": ("googlenet", "inception-v3"),
    "densenet": ("densenet121",),
    "mobilenet": ("mobilenet-v3",),
    "amoebanet": ("amoebanet36",),
    "convnext": ("convnext",),
    "unet": ("unet",),
    "vit": ("vit",),
    "swin": ("swin",),
    "bert": ("bert-large", "bert48"),
    "xlnet": ("xlnet36",),
    "gpt": ("gpt2",),
    "llama": ("llama",),
    "t5": ("t5",),
    "gnmt": ("gnmt8", "gnmt16"),
    "lstm": ("awd-lstm", "residual-lstm", "s2vt"),
}
"""The models in each module of the zoo; each model has a published size and a small size."""

SMALL = "-small"
"""Ends the name of a model's small size."""

ZOO = {
    "digits": "hetpipe.zoo.digits:workload",
    "mlp": "hetpipe.zoo.mlp:workload",
    "gpt": "hetpipe.zoo.gpt:workload",
    "gpt-untied": "hetpipe.zoo.gpt:untied_workload",
    "lstm": "hetpipe.zoo.lstm:workload",
    **{
        name + size: f"hetpipe.zoo.{module}:MODELS"
        for module, names in FAMILIES.items()
        for name in names
        for size in ("", SMALL)
    },
}
"""The place of each model: a function that returns its workload, or a dict of models by name."""


def load_workload(name: str) -> Workload:
    """Return the zoo's workload with this name, or the result of `package.module:factory`.

    The module may be in the working directory, which is appended to the import path, so a
    `queue.py` there does not hide the standard library's. Raises `HetpipeError` if the workload is
    missing or wrong, and `UserCodeError` if its code raises.
    """
    check_name(name)
    if name in ZOO:
        module_name, _, attribute = ZOO[name].partition(":")
        model = getattr(import_module(module_name), attribute)
        workload: Workload = model[name].workload(name) if attribute == "MODELS" else model()
        return workload
    from hetpipe.zoo.user_code import check_workload, run_user_code

    with run_user_code(f"model {name!r}: its module"):
        factory = _factory(name)
    call = f"{name}()"
    with run_user_code(call):
        workload = factory()
    return check_workload(call, workload)


def zoo_names(published: bool) -> list[str]:
    """Return the names of the zoo's models with published sizes, or of all other models."""
    with_small = {name.removesuffix(SMALL) for name in ZOO if name.endswith(SMALL)}
    return [name for name in ZOO if (name in with_small) == published]


def check_name(name: str) -> None:
    """Raise `HetpipeError` for a name that is neither in the zoo nor `module:factory`."""
    module_name, _, attribute = name.partition(":")
    if name not in ZOO and not (module_name and attribute):
        raise HetpipeError(
            f"no model {name!r}; {near(name, ZOO)}write one of {', '.join(ZOO)}, or "
            "package.module:factory"
        )


def _factory(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports a missing module
        raise HetpipeError(
            f"model {name!r}: no module {error.name!r}; start hetpipe in a folder where the module "
            "can be imported"
        ) from error
    factory: Callable[[], Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        file = getattr(module, "__file__", None) or "built into Python"
        raise HetpipeError(
            f"model {name!r}: {module_name} ({file}) has no function {attribute!r}; name a "
            "function that returns a Workload"
        )
    return factory


def optimizer_of(workload: Workload) -> Optimizer:
    """Return the workload's optimizer, or SGD with momentum if it has none."""
    from hetpipe import optim

    return workload.optimizer or optim.sgd(lr=0.05, momentum=0.9)
