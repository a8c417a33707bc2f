"""Refuses parts of a model that torch.export would lose silently or cannot express."""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hetpipe.capture.export.named_tensors import roots
from hetpipe.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_CAPTURE = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_path("stdlib")
_RUNS = {"run_model": "the model", "run_loss": "loss_fn"}
"""Functions of `hetpipe.capture.export.torch_export` that run the user's code."""


def check_modules(model: nn.Module, loss_fn: Callable[..., Any]) -> None:
    """Raise `CaptureError` for modules and hooks that export would change or lose."""
    for prefix, root in roots(model, loss_fn):
        _check_modules(root, prefix, "the loss" if prefix else "the model")


def _check_modules(root: nn.Module, prefix: str, called: str) -> None:
    for name, module in root.named_modules():
        where = f"{prefix + name if name else called} ({type(module).__name__})"
        if (
            isinstance(module, _BatchNorm)
            and module.momentum is None
            and module.running_mean is not None
            and module.training
        ):
            raise CaptureError(
                f"{where} has momentum=None, a cumulative average whose factor depends on data; "
                "give it a number, for instance momentum=0.1"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
            raise CaptureError(
                f"{where} has track_running_stats=True, but export loses the "
                "statistics of the training; use False"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CaptureError(f"{where} has sparse=True; sparse gradients are lost, use False")
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"{where} has a backward hook, which would be lost; remove it")
    for name, parameter in root.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or hooks:
            raise CaptureError(
                f"parameter {prefix}{name} has a gradient hook, which would be lost; remove it"
            )


@contextmanager
def refuse_lost_gradients() -> Iterator[None]:
    """Inside the block, raise `CaptureError` for code whose gradient would be lost in export."""
    function: Any = torch.autograd.Function
    tensor: Any = torch.Tensor
    autograd: Any = torch.autograd
    apply, register_hook = function.__dict__["apply"], tensor.register_hook
    run_backward = autograd._engine_run_backward  # `grad` and `backward` both call it
    # A model may have stored the bound method, `double = Double.apply`, which calls `forward`.
    functions = [cls for cls in _subclasses(function) if "forward" in cls.__dict__]
    forwards = [(cls, cls.__dict__["forward"]) for cls in functions if not _is_plumbing(cls)]

    def refusing(cls: type) -> Callable[..., Any]:
        def refuse_forward(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(
                f"{cls.__qualname__} is a torch.autograd.Function, and export "
                "loses its backward; write it with torch.library.custom_op "
                "and register_autograd"
            )

        return refuse_forward

    def refuse_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _is_plumbing(cls):
            return apply.__get__(None, cls)(*args, **kwargs)
        return refusing(cls)()

    def refuse_hook(self: torch.Tensor, hook: Any) -> Any:
        raise CaptureError("Tensor.register_hook is lost by export; remove the hook")

    capturing = threading.get_ident()

    def refuse_backward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != capturing:  # another thread trains another model
            return run_backward(*args, **kwargs)
        raise CaptureError(
            "a gradient is computed inside the model or the loss (torch.autograd.grad, backward), "
            "and export loses how it depends on parameters; write its formula in the forward"
        )

    function.apply = classmethod(refuse_apply)
    autograd._engine_run_backward = refuse_backward
    tensor.register_hook = refuse_hook
    for cls, _ in forwards:
        cls.forward = staticmethod(refusing(cls))
    try:
        yield
    finally:
        function.apply = apply
        autograd._engine_run_backward = run_backward
        tensor.register_hook = register_hook
        for cls, forward in forwards:
            cls.forward = forward


def _subclasses(cls: type) -> list[Any]:
    children: list[type] = cls.__subclasses__()
    return [cls for child in children for cls in (child, *_subclasses(child))]


def _is_plumbing(cls: type) -> bool:
    """Return whether the class is torch's own wrapper of custom operators."""
    return cls.__module__.startswith("torch._")


def explain(error: Exception) -> CaptureError:
    """Turn the error of a failed export into one sentence, with its origin and the user's line."""
    frame = _user_frame(error)
    where = f" at {frame.filename}:{frame.lineno} ({frame.line})" if frame else ""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = text.removesuffix(".")
    if isinstance(error, CaptureError):
        return CaptureError(f"{text}{where}")
    kind = type(error).__name__
    whose = _failing_code(error)
    if whose and not type(error).__module__.startswith("torch."):
        said = f": {text}" if text else ""
        return CaptureError(
            f"{whose} raised {kind} while it was captured{where}{said}{_advice(error, where)}"
        )
    return CaptureError(
        f"the model cannot be exported{where}: {text or kind}{_advice(error, where)}"
    )


def _failing_code(error: BaseException) -> str | None:
    """Return "the model" or "loss_fn" if the error passed through the user's code, else None."""
    for link in _chain(error):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if frame.filename.startswith(_CAPTURE) and frame.name in _RUNS:
                return _RUNS[frame.name]
    return None


def where(node: fx.Node) -> str:
    """Return " at file:line" of the user's call that made a node, if torch recorded it."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [f" at {name}:{line}" for name, line in frames if is_user_code(name)]
    return users[-1] if users else ""


def user_line() -> str:
    """Return " at file:line" of the innermost frame of the user's code that runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the deepest frame of the user's code, in the error or its causes."""
    for link in _chain(error):
        frames = [f for f in traceback.extract_tb(link.__traceback__) if is_user_code(f.filename)]
        if frames:
            return frames[-1]
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def is_user_code(filename: str) -> bool:
    if filename.startswith((_TORCH, _CAPTURE, "<")):
        return False
    return "site-packages" in filename or not filename.startswith(_STDLIB)


def _advice(error: Exception, where: str) -> str:
    """Return the cure of a failed export, from its text and the user's line; "" if unknown."""
    text = f"{type(error).__name__} {error}"
    if "ctc_loss" in text:
        return (
            "; the CTC loss reads the lengths of inputs and targets as numbers, which a graph does "
            "not have: call torch.ops.aten._ctc_loss and _ctc_loss_backward in two operators of "
            "your own (torch.library.custom_op), which torch devices run"
        )
    if "nested" in text or re.search(r"torch\.nested|nested_tensor\(", where):
        return "; a graph has no nested tensors: pad rows to one length, and give a mask in x"
    if "GuardOnDataDependent" in text or "data-dependent" in text:
        return (
            "; control flow may not depend on a tensor's values: use torch.where, or decide "
            "outside of the model"
        )
    if "DataDependentOutput" in text or "DynamicOutputShape" in text:
        return (
            "; this operator needs the values of tensors before it runs, which a graph does not "
            "have: use another operator, or define one of your own with torch.library.custom_op"
        )
    if "more than 1 value per channel" in text:
        return (
            "; a micro-batch, and each replica's rows of it, need 2 samples or more: use fewer "
            "micro-batches or fewer replicas"
        )
    return ""
