"""Workloads by name: the zoo's own, or `package.module:factory` of the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetpipe.errors import HetpipeError
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
    "gpt2": ("gpt2",),
    "llama": ("llama",),
    "t5": ("t5",),
    "gnmt": ("gnmt8", "gnmt16"),
    "awd": ("awd-lstm",),
    "residual_lstm": ("residual-lstm",),
    "s2vt": ("s2vt",),
}
"""Modules of the zoo by the models that they have, at published sizes and at small ones."""

SMALL = "-small"
"""The end of the name of a model that is there at its published size too."""

ZOO = {
    "digits": "hetpipe.zoo.digits:workload",
    "mlp": "hetpipe.zoo.mlp:workload",
    "gpt": "hetpipe.zoo.gpt:workload",
    "gpt-untied": "hetpipe.zoo.gpt:untied_workload",
    "lstm": "hetpipe.zoo.lstm:workload",
    **{
        name + size: f"hetpipe.zoo.{module}:{(name + size).replace('-', '_')}"
        for module, names in FAMILIES.items()
        for name in names
        for size in ("", SMALL)
    },
}


def load_workload(name: str) -> Workload:
    """The zoo's workload of that name, or the result of `package.module:factory`.

    Modules are looked for in the working directory too, after all others: a `queue.py` there is not
    the standard library's. It stays on the path for later imports of the module.
    Raises `HetpipeError` if there is none or it is wrong, `UserCodeError` if its code raises.
    """
    check_name(name)
    if name in ZOO:
        workload: Workload = _factory(name, ZOO[name])()
        return workload
    from hetpipe.zoo.checked import checked, theirs

    with theirs(f"model {name!r}: its module"):
        factory = _factory(name, name)
    call = f"{name}()"
    with theirs(call):
        workload = factory()
    return checked(call, workload)


def zoo_names(published: bool) -> list[str]:
    """The zoo's models at their published sizes, or else the others: all that are small."""
    with_small = {name.removesuffix(SMALL) for name in ZOO if name.endswith(SMALL)}
    return [name for name in ZOO if (name in with_small) == published]


def check_name(name: str) -> None:
    """Raises `HetpipeError` for a name that is neither in the zoo nor `module:factory`."""
    module_name, _, attribute = name.partition(":")
    if name not in ZOO and not (module_name and attribute):
        raise HetpipeError(
            f"no model {name!r}; write one of {', '.join(ZOO)}, or package.module:factory"
        )


def _factory(name: str, target: str) -> Callable[[], Any]:
    module_name, _, attribute = target.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports a missing one
        raise HetpipeError(
            f"model {name!r}: no module {error.name!r}; start hetpipe where it can be imported"
        ) from error
    factory: Any = getattr(module, attribute, None)
    if not callable(factory):
        file = getattr(module, "__file__", None) or "built into Python"
        raise HetpipeError(f"model {name!r}: {module_name} ({file}) has no function {attribute!r}")
    return factory  # type: ignore[no-any-return]


def optimizer_of(workload: Workload) -> Optimizer:
    """The workload's own optimizer, or SGD with momentum."""
    from hetpipe import optim

    return workload.optimizer or optim.sgd(lr=0.05, momentum=0.9)
