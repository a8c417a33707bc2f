"""Signature: a hash of everything that a model's Python code asks of torch, in a fraction of the
time of an export.

Export runs the code on fake tensors and records operators. Here the same code runs on tensors of
the meta device, and every call of torch's interface is hashed: its function, its arguments, the
module that it is in, and the state of autograd and autocast. A tensor is known by its number, the
name of its parameter, or the values of a constant. So the code may change between two starts of a
program in any way, in globals or in files that it reads: where the signature is the same, export
has the same calls to record.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, TypeGuard

import torch
import torch._compile
import torch._decomp.decompositions
import torch._refs.nn.functional
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(...), slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


COMPILER_SKIPS = "__dynamo_disable"
"""The attribute of a function that has its form for the compiler, see `torch/_compile.py`."""


class UnsignedError(Exception):
    """The code did something that a signature cannot describe."""


def sign(run: nn.Module, leaves: list[torch.Tensor]) -> str | None:
    """The signature of `run(*leaves)`; None if the code needs the values of tensors, or other
    arguments than tensors and plain values. Neither modules nor leaves are changed."""
    try:
        run = _copied(run)
    except Exception:  # an attribute that cannot be copied, such as a lock
        return None
    names: dict[str, torch.Tensor] = {**dict(run.named_parameters()), **dict(run.named_buffers())}
    recorder = _Recorder()
    metas = {name: recorder.named(name, value) for name, value in names.items()}
    inputs = [recorder.named(f"leaf {i}", leaf) for i, leaf in enumerate(leaves)]
    try:
        with _without_compiler(), _announcing(run, recorder), torch.device("meta"), recorder:
            torch.func.functional_call(run, metas, tuple(inputs))
    except Exception:  # the export will say what is wrong, if anything is
        return None
    return recorder.digest.hexdigest()


def _copied(run: nn.Module) -> nn.Module:
    """The modules with the same tensors: what code writes to its attributes is the copy's."""
    values = (value for module in run.modules() for value in vars(module).values())
    tensors = [
        *run.parameters(),
        *run.buffers(),
        *(value for value in values if isinstance(value, torch.Tensor)),
    ]
    return copy.deepcopy(run, {id(tensor): tensor for tensor in tensors})


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the id of one

    def named(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The parameter, buffer or leaf on the meta device."""
        meta = value.detach().to("meta").requires_grad_(value.requires_grad)
        self.note(("named", name, type(value).__name__), self._described(meta))
        self._number(meta)
        return meta

    def note(self, *words: object) -> None:
        """Add words to the signature."""
        self.digest.update(repr(words).encode())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = tree_map(self._on_meta, (list(args), dict(kwargs or {})))
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        self.note(resolve_name(func) or _name_of(func), *state)
        self._describe(arguments)
        result = func(*arguments[0], **arguments[1])
        self._describe(result)
        return result

    def _on_meta(self, value: Any) -> Any:
        """A constant's values count; the call goes on with a tensor without values."""
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        if id(value) not in self._numbers:
            self.note("constant", value.detach().cpu().contiguous().view(-1).tolist())
        return value.detach().to("meta").requires_grad_(value.requires_grad)

    def _describe(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.note(self._number(value), self._described(value))
        elif isinstance(value, Mapping):
            self.note("mapping", len(value))
            for key, item in value.items():
                self.note(key)
                self._describe(item)
        elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            self.note(type(value).__name__, len(value))
            for item in value:
                self._describe(item)
        elif isinstance(value, _PLAIN):
            self.note(value)
        elif isinstance(value, type) or callable(value):
            self.note(_name_of(value))
        else:
            raise UnsignedError(type(value).__name__)

    def _described(self, tensor: torch.Tensor) -> tuple[object, ...]:
        layout = (tuple(tensor.shape), tensor.stride()) if tensor.layout == torch.strided else ()
        return (*layout, str(tensor.dtype), str(tensor.layout), tensor.requires_grad)

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        return self._numbers[id(tensor)]


def _name_of(value: Any) -> str:
    try:
        return f"{value.__module__}.{value.__qualname__}"
    except AttributeError:
        raise UnsignedError(repr(type(value))) from None


@contextmanager
def _announcing(run: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Inside, every call of a module of `run` is noted, with its name and its end."""
    names = {module: name for name, module in run.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        recorder.note("enter", names.get(module), type(module).__qualname__, module.training)

    def after(module: nn.Module, _args: Any, _result: Any) -> None:
        recorder.note("leave", names.get(module))

    register = torch.nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(before),
        register.register_module_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Inside, torch's shape functions in Python do not import its compiler, which takes a second.

    They do so, when they are first called, only to be left alone by the compiler.
    """
    marked = [] if "torch._dynamo" in sys.modules else list(_hidden_from_compiler())
    for function in marked:
        setattr(function, COMPILER_SKIPS, function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, COMPILER_SKIPS)


def _hidden_from_compiler() -> Iterator[FunctionType]:
    """The functions among torch's shape functions that `torch._compile._disable_dynamo` has wrapped
    and that do not have their form for the compiler yet."""
    modules = (torch._refs, torch._refs.nn.functional, torch._decomp.decompositions)
    stack = [value for module in modules for value in vars(module).values()]
    seen: set[int] = set()
    while stack:
        function = stack.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        inside = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        stack += inside
        if function.__code__.co_filename == torch._compile.__file__:
            yield from (f for f in inside if _is_new(f))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_new(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and not hasattr(function, COMPILER_SKIPS)
