"""Names the tensors of a model and of its loss.

The model's tensors keep their names. If the loss is a module, its tensors have the prefix `loss.`:
a parameter `centers` of the loss is `loss.centers` in checkpoints and optimizers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hetpipe.errors import CaptureError

LOSS_PREFIX = "loss."
Copied = TypeVar("Copied")


class NamedTensors:
    """The parameters and buffers of a model and its loss, by name.

    A tensor with several names appears once, under its first name; `aliases` maps its other names
    to the first. A tensor that model and loss share has its name in the model. Raises
    `CaptureError` if a tensor of the loss would get the name of a tensor of the model.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        names: dict[int, str] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        model_names: set[str] = set()
        for prefix, module in roots(model, loss_fn):
            for tensors, named in (
                (self.parameters, module.named_parameters(remove_duplicate=False)),
                (self.buffers, module.named_buffers(remove_duplicate=False)),
            ):
                for own_name, tensor in named:
                    name = prefix + own_name
                    if prefix and name in model_names:
                        raise CaptureError(
                            f"the loss's tensor {own_name} would be called {name} in checkpoints, "
                            "but the model has a tensor of that name; rename one of them"
                        )
                    first = names.setdefault(id(tensor), name)
                    if first == name:
                        tensors[name] = tensor
                    else:
                        self.aliases[name] = first
            model_names = {*self.parameters, *self.buffers, *self.aliases}

    def loss_digest(self) -> str:
        """Return a hash of the values of the loss's tensors."""
        digest = hashlib.sha256()
        for name, tensor in {**self.parameters, **self.buffers}.items():
            if name.startswith(LOSS_PREFIX):
                digest.update(name.encode() + tensor_bytes(tensor))
        return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the values of a strided tensor of any dtype, row by row."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def copy_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss. Of a module return a copy with the same parameters: calls change buffers."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    return deep_copy(loss_fn, loss_fn.parameters())


def deep_copy(value: Copied, shared: Iterable[torch.Tensor] = ()) -> Copied:
    """Return a deep copy of modules, except for the `shared` tensors.

    Code may store computed tensors in attributes. torch cannot deep-copy such tensors, so their
    copies are constants with the same values.
    """
    with _CopyComputed():
        return copy.deepcopy(value, {id(tensor): tensor for tensor in shared})


class _CopyComputed(TorchFunctionMode):
    """Lets `deepcopy` of a computed tensor return a constant with the same values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def check_capturable(model: Any) -> None:
    """Raise `CaptureError` if the model is no module, or one of its tensors has no shape yet."""
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"the model is {type(model).__name__} {getattr(model, '__name__', '')!r}, not an "
            "nn.Module: write a module whose forward calls it, so that its parameters have names"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet, as in nn.LazyLinear: call the model once with a batch "
                "before it is captured"
            )


def roots(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model, and the loss if it is a module, each with its prefix for names."""
    yield "", model
    if isinstance(loss_fn, nn.Module):
        yield LOSS_PREFIX, loss_fn


def exported_name(target: str) -> str:
    """Return the name of a tensor that the exported graph calls `model.NAME` or `loss_fn.NAME`."""
    root, _, name = target.partition(".")
    return name if root == "model" else LOSS_PREFIX + name


def move_to_cpu(
    model: nn.Module, loss_fn: Callable[..., Any]
) -> tuple[nn.Module, Callable[..., Any]]:
    """Return model and loss; if a tensor is on another device, return copies on the CPU.

    Tensors that model and loss share stay shared.
    """
    modules = [module for _, module in roots(model, loss_fn)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return model, loss_fn
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise CaptureError("the model is on the meta device; give its parameters values first")
    copies = [module.cpu() for module in deep_copy(modules)]
    return copies[0], copies[1] if len(copies) > 1 else loss_fn


def array_of(name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy a parameter or buffer to an array. Raises `CaptureError` if it cannot be trained."""
    if tensor.layout != torch.strided:
        raise CaptureError(f"{name} is a {tensor.layout} tensor: convert it with to_dense()")
    if tensor.is_complex():
        raise CaptureError(
            f"the parameter {name} is {tensor.dtype}: train its real and imaginary part, and join "
            "both with torch.view_as_complex"
        )
    if tensor.dtype == torch.bfloat16:
        raise CaptureError(
            f"{name} is a {tensor.dtype} tensor: convert the model with model.float(), and let "
            "passes compute in bfloat16 with precision='bfloat16'"
        )
    return np.array(tensor.detach().numpy(), order="C", copy=True)
