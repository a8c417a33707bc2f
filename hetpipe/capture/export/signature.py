"""Hashes everything that a model's Python code asks of torch, much faster than an export.

Export runs the code on fake tensors and records operators. Here the same code runs on tensors of
the meta device, and every call of torch's interface is hashed: its function, its arguments, its
module, and the state of autograd and autocast. As in an export, `torch.compiler.is_exporting()` is
true, so that code which asks takes the same way. A parameter is identified by its name, a constant
by its values, and any other tensor by a number. So the code, its globals and the files that it
reads may change in any way between two starts of a program: if the signature is the same, export
records the same calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._export.utils import _compiling_state_context
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from hetpipe.capture.export.attributes import DEPTH, MODULE_TABLES, clear_caches
from hetpipe.capture.export.named_tensors import deep_copy, tensor_bytes
from hetpipe.capture.export.random_operators import DrawWatcher
from hetpipe.capture.export.unsupported import user_line
from hetpipe.capture.export.without_compiler import without_compiler

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(...), slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip

_IS_META = "torch.Tensor.is_meta.__get__"


class UnsignedError(Exception):
    """The code did something that a signature cannot describe."""


class Rehearsal:
    """Calls a copy of `run` with the same leaves, again and again.

    A call sees the changes that earlier calls have made to attributes and lists. Tensors are on the
    meta device, without values; with `computes`, they are copies with values.
    """

    def __init__(self, run: nn.Module, leaves: list[torch.Tensor], computes: bool = False) -> None:
        """Copy the module. Raises any error of the copy."""
        self.run = deep_copy(run) if computes else _copy_modules(run)
        self._computes = computes
        named = {**dict(self.run.named_parameters()), **dict(self.run.named_buffers())}
        self._named = {name: self._prepared(value) for name, value in named.items()}
        self._digests = {  # complex tensors become constants
            name: hashlib.sha256(tensor_bytes(value)).hexdigest()
            for name, value in named.items()
            if value.is_complex()
        }
        self._leaves = [self._prepared(leaf) for leaf in leaves]
        self._own = {id(value) for value in (*named.values(), *leaves)}
        self.calls: list[Call] = []
        self.attributes = attributes_of(self.run)
        """The copy's attributes before the first call."""
        self.original = attributes_of(run)
        """The attributes of `run` itself."""

    def _prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach()
        value = value.clone() if self._computes else value.to("meta")
        return value.requires_grad_(tensor.requires_grad)

    def call(self, locates: bool = False) -> Call:
        """Call the module once more. With `locates` the events have lines of the user's code.

        Raises the code's errors, and `UnsignedError`.
        """
        call = Call(self.calls, self._own, self._computes, locates)
        for name, value in self._named.items():
            call.add_named(name, value, self._digests.get(name, ""))
        for index, leaf in enumerate(self._leaves):
            call.add_named(f"leaf {index}", leaf)
        device = nullcontext() if self._computes else torch.device("meta")
        chance = _fix_seed() if self._computes else nullcontext()
        run = self.run
        with (
            chance, without_compiler(), clear_caches(run), _note_modules(run, call), device,
            _compiling_state_context(), call.draws, call,
        ):  # fmt: skip
            torch.func.functional_call(run, self._named, tuple(self._leaves))
        self.calls.append(call)
        return call


@contextmanager
def _fix_seed() -> Iterator[None]:
    """Let torch draw the same numbers in every block, and restore its generator on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _copy_modules(run: nn.Module) -> nn.Module:
    """Copy the modules but not their tensors, so that code writes to attributes of the copy."""
    values = (value for module in run.modules() for value in vars(module).values())
    attributes = filter(torch.is_tensor, values)
    return deep_copy(run, [*run.parameters(), *run.buffers(), *attributes])


def attributes_of(run: nn.Module) -> dict[tuple[str, ...], Any]:
    """Return the attributes of all modules, and the items of their lists and dicts, by path."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in run.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in MODULE_TABLES:
                _add(found, (name, attribute), value)
    return found


def _add(found: dict[tuple[str, ...], Any], key: tuple[str, ...], value: Any) -> None:
    found[key] = value
    if len(key) > DEPTH:
        return
    if isinstance(value, Mapping):
        for name, item in list(value.items()):
            _add(found, (*key, repr(name)), item)
    elif isinstance(value, (list, tuple)) and len(value) < 100:
        for index, item in enumerate(value):
            _add(found, (*key, str(index)), item)


class CarriedTensor(NamedTuple):
    """A tensor that an earlier call made."""

    tensor: torch.Tensor
    is_live: bool
    event: int  # the number of the first event that uses it


class Call(TorchFunctionMode):
    """One call of a module as a list of events, one for each call of a torch function.

    A tensor is *live* if it was computed from parameters, buffers, leaves or random numbers.
    """

    def __init__(
        self, earlier: Sequence[Call], own: set[int], computes: bool, locates: bool
    ) -> None:
        super().__init__()
        self.events: list[str] = []
        self.live_events: list[str] = []
        """The events that compute with a live tensor, without the values of constants. A query like
        `x.dtype` computes nothing."""
        self.lines: list[str] = []
        """" at file:line" for every event, if requested."""
        self.carried: dict[int, CarriedTensor] = {}
        """The tensors of earlier calls that this call uses, by id."""
        self.outside: list[tuple[torch.Tensor, str]] = []
        """The tensors that require a gradient but are neither parameters nor results of calls; each
        with the " at file:line" of its first use, if requested."""
        self.changed: list[tuple[torch.Tensor, str]] = []
        """The constants that the call changed in place, with lines as in `outside`."""
        self._earlier = {i: i in call._live for call in earlier for i in call._made}
        self._made: set[int] = set()  # the ids of results
        self._own, self._computes, self._locates = own, computes, locates
        self._numbers: dict[int, tuple[bool, int]] = {}
        self._counts = {True: 0, False: 0}
        self._live: set[int] = set()
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so that ids stay unique
        self._words: list[object] = []
        self._live_words: list[object] = []
        self._is_live = False
        self.draws = DrawWatcher()  # type: ignore[no-untyped-call]

    @property
    def signature(self) -> str:
        """A hash of all events."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()

    def add_named(self, name: str, value: torch.Tensor, digest: str = "") -> None:
        """Add the event of a parameter, buffer or leaf, before the call."""
        self._live.add(id(value))
        self._earlier.pop(id(value), None)
        self.note(
            "named", name, digest, type(value).__name__, self._described(value), self._number(value)
        )
        self._end()

    def note(self, *words: object) -> None:
        """Add words to the present event."""
        self._words += words
        self._live_words += words

    def add_event(self, *words: object) -> None:
        """Add an event without tensors."""
        self.note(*words)
        self._end()

    def _end(self) -> None:
        self.events.append(repr(self._words))
        if self._is_live:
            self.live_events.append(repr(self._live_words))
        if self._locates:
            self.lines.append(user_line())
        self._words, self._live_words, self._is_live = [], [], False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = resolve_name(func) or _name_of(func)
        changed = args[0] if args and _is_in_place(name) else None
        self._note_change(changed)
        self.note(name, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        learns = torch.is_grad_enabled() and not name.endswith((".detach", ".__get__"))
        arguments = tree_map(partial(self._argument, learns), (list(args), dict(kwargs or {})))
        self._describe(arguments)
        self.draws.seen = False
        result = func(*arguments[0], **arguments[1])
        if name == _IS_META:
            result = False  # otherwise nn.init.orthogonal_ would draw nothing
        self._is_live |= self.draws.seen
        if self._is_live and isinstance(changed, torch.Tensor):  # a view's base changes too
            self._live |= {id(changed), id(changed._base)}
        tree_map(partial(self._add_result, self._is_live), result)
        self._describe(result)
        self._is_live &= changed is not None or any(map(torch.is_tensor, tree_leaves(result)))
        self._end()
        return result

    def _note_change(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and id(value) not in self._numbers:
            self.changed.append((value, user_line() if self._locates else ""))

    def _add_result(self, is_live: bool, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers and id(value) not in self._earlier:
                self._made.add(id(value))
            if is_live:
                self._live.add(id(value))
        return value

    def _argument(self, learns: bool, value: Any) -> Any:
        """Hash a constant's values; on the meta device, replace it by a tensor without values."""
        if not isinstance(value, torch.Tensor) or id(value) in self._numbers:
            return value
        if value.device.type == "meta" or id(value) in self._earlier:
            return value
        if value.requires_grad and learns and id(value) not in self._own:
            self.outside.append((value, user_line() if self._locates else ""))
        if value.grad_fn is None:
            data = hashlib.sha256(tensor_bytes(value)).hexdigest()
            self._words.append(("constant", data))
        if self._computes:
            return value
        return value.detach().to("meta").requires_grad_(value.requires_grad)

    def _describe(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            described = self._described(value)
            is_live, number = self._number(value)
            self._words += [number, is_live, described]
            self._live_words += [number if is_live else "constant", described]
            self._is_live |= is_live
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
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            data = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            self.note("array", value.shape, str(value.dtype), data)
        elif isinstance(value, np.generic):
            self.note(repr(value))
        elif isinstance(value, type) or callable(value):
            self.note(_name_of(value))
        else:
            raise UnsignedError(type(value).__name__)

    def _described(self, tensor: torch.Tensor) -> tuple[object, ...]:
        layout = (tuple(tensor.shape), tensor.stride()) if tensor.layout == torch.strided else ()
        return (*layout, str(tensor.dtype), str(tensor.layout), tensor.requires_grad)

    def _number(self, tensor: torch.Tensor) -> tuple[bool, int]:
        """Return whether the tensor is live, and its number among live or other tensors."""
        key = id(tensor)
        if key not in self._numbers:
            if key in self._earlier:
                is_live = self._earlier[key]
                self.carried[key] = CarriedTensor(tensor, is_live, len(self.events))
                if is_live:
                    self._live.add(key)
            is_live = key in self._live
            self._numbers[key] = is_live, self._counts[is_live]
            self._counts[is_live] += 1
            self._kept.append(tensor)
        return self._numbers[key]


def _is_in_place(name: str) -> bool:
    """Return whether a function of this name changes the values of its first argument."""
    last = name.rpartition(".")[2]
    operator = last.startswith("__i") and last not in ("__index__", "__int__", "__invert__")
    named = last.endswith("_") and not last.endswith("__") and last != "requires_grad_"
    return named or operator or last == "__setitem__"


def _name_of(value: Any) -> str:
    try:
        return f"{value.__module__}.{value.__qualname__}"
    except AttributeError:
        raise UnsignedError(repr(type(value))) from None


@contextmanager
def _note_modules(run: nn.Module, call: Call) -> Iterator[None]:
    """Note every call of a module of `run` inside the block, with its name and its end."""
    names = {module: name for name, module in run.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        call.add_event("enter", names.get(module), type(module).__qualname__, module.training)

    def after(module: nn.Module, _args: Any, _result: Any) -> None:
        call.add_event("leave", names.get(module))

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
