"""Refuses code whose next call would differ from the call that capture records.

Export would turn these values into constants: state in attributes and lists, counters, and random
numbers of Python and numpy. So capture calls a copy of the model twice: both calls must ask torch
for the same operations. A call may store a value for later calls, such as a mask, if the value
depends only on constants.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from hetpipe.capture.export.signature import Call, Rehearsal, attributes_of
from hetpipe.capture.export.unsupported import is_user_code
from hetpipe.errors import CaptureError

_BUFFER = (
    "capture would fix the present value. Keep the value in a buffer (register_buffer) that "
    "forward changes, or pass the value in with the batch"
)
_FAR = 1_000_003
"""Added to a counter, to see whether anything depends on the counter."""


def check_repeatable(rehearsal: Rehearsal) -> frozenset[tuple[str, str]]:
    """Raise `CaptureError` unless later calls of the module repeat its first call.

    The rehearsal has made the first call already. Return the attributes that calls change without
    an effect on later calls, as (module, attribute).
    """
    try:
        return _check(rehearsal)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            "the model could be called once but not again, with the same batch: "
            f"{type(error).__name__}: {error}; forward must leave the model as it was"
        ) from error


def _check(rehearsal: Rehearsal) -> frozenset[tuple[str, str]]:
    first = rehearsal.calls[0]
    if _untrained_tensors(rehearsal, first):
        raise _untrained_error(rehearsal)
    if first.changed:
        _check_changed(rehearsal)
    generators = generators_of(rehearsal.run)
    with restore_generators(generators):
        states, before = _states(generators), attributes_of(rehearsal.run)
        second = rehearsal.call()
        if _states(generators) != states:
            raise _chance_error(rehearsal, generators)
        after = attributes_of(rehearsal.run)
        changed = {key for key, value in after.items() if before.get(key) is not value}
        if not _agree(first, second, rehearsal):
            raise _state_error(rehearsal, second)
        counters = [
            key for key in changed if _is_number(after[key]) and _is_number(before.get(key))
        ]
        if counters:
            _check_counters(rehearsal, counters)
        begin = rehearsal.attributes
        changed |= {key for key, value in after.items() if begin.get(key) is not value}
        return frozenset((key[0], key[1]) for key in changed)


def _check_changed(rehearsal: Rehearsal) -> None:
    """Raise `CaptureError` for an attribute that is changed in place and is no buffer."""
    names = {id(value): key for key, value in attributes_of(rehearsal.run).items()}
    call = rehearsal.call(locates=True)
    for tensor, line in call.changed:
        if id(tensor) in names:
            raise CaptureError(
                f"the attribute {_user_name(rehearsal.run, names[id(tensor)])} is changed in place"
                f"{line}; {_BUFFER}"
            )


def _agree(first: Call, second: Call, rehearsal: Rehearsal) -> bool:
    """Return whether the calls differ at most by values that the first call stored permanently."""
    if any(carried.is_live for carried in second.carried.values()):
        return False
    if first.events == second.events and not second.carried:
        return True
    if first.live_events != second.live_events:
        return False
    third = rehearsal.call()
    return third.events == second.events and third.carried.keys() == second.carried.keys()


def _check_counters(rehearsal: Rehearsal, counters: list[tuple[str, ...]]) -> None:
    """Raise `CaptureError` if the calls depend on the value of a counter."""
    last = rehearsal.calls[-1]
    for key in counters:
        owner, name = dict(rehearsal.run.named_modules())[key[0]], key[1]
        if len(key) > 2:
            continue  # the counter is inside a container
        value = getattr(owner, name)
        setattr(owner, name, value + _FAR)
        try:
            call = rehearsal.call()
            depends = call.events != last.events
        except Exception:
            depends = True
        setattr(owner, name, value)
        if depends:
            raise CaptureError(
                f"forward depends on the attribute {_user_name(rehearsal.run, key)}, which every "
                f"call changes; {_BUFFER}"
            )


def _untrained_tensors(rehearsal: Rehearsal, call: Call) -> list[tuple[torch.Tensor, str]]:
    """Return the tensors outside of model and loss that require a gradient, with their lines.

    A loss may read an attribute that `forward` sets, such as `model.auxiliary`. In a rehearsal the
    loss reads this attribute from the user's model, not from the copy. Such a tensor does not count
    if every call sets the copy's attribute, since export will then find a computed tensor there.
    """
    begin, after = rehearsal.attributes, attributes_of(rehearsal.run)
    original = rehearsal.original
    renewed = {id(original[key]) for key in original if after.get(key) is not begin.get(key)}
    return [(tensor, line) for tensor, line in call.outside if id(tensor) not in renewed]


def _untrained_error(rehearsal: Rehearsal) -> CaptureError:
    tensor, line = _untrained_tensors(rehearsal, rehearsal.call(locates=True))[0]
    names = [key for key, value in attributes_of(rehearsal.run).items() if value is tensor]
    called = f" {_user_name(rehearsal.run, names[0])}" if names else ""
    return CaptureError(
        f"a tensor{called} of shape {tuple(tensor.shape)} requires a "
        f"gradient{line} but is no parameter of the model or of loss_fn, so it "
        "would not be trained: make it an nn.Parameter of the model, or of a "
        "loss_fn that is an nn.Module, or read it under torch.no_grad() or by "
        "detach()"
    )


def _chance_error(rehearsal: Rehearsal, generators: Mapping[str, Any]) -> CaptureError:
    states = _states(generators)
    with _watch_lines(lambda: _states(generators)) as changes:
        rehearsal.call()
    now = _states(generators)
    name = next((n for n in generators if now[n] != states[n]), next(iter(generators)))
    line = changes[0] if changes else ""
    return CaptureError(
        f"forward draws numbers from {name}{line}: capture would fix this one draw for all "
        "mini-batches; use torch.rand, torch.bernoulli or dropout, or pass the numbers in with the "
        "batch"
    )


def _state_error(rehearsal: Rehearsal, second: Call) -> CaptureError:
    """Return the error for calls that differ; call again to find the attribute or the line."""
    before = attributes_of(rehearsal.run)
    call = rehearsal.call(locates=True)
    after = attributes_of(rehearsal.run)
    names = {id(value): key for key, value in before.items()}
    for carried in call.carried.values():
        if carried.is_live or id(carried.tensor) in names:
            key = names.get(id(carried.tensor))
            called = (
                "a tensor" if key is None else f"the attribute {_user_name(rehearsal.run, key)}"
            )
            return CaptureError(
                f"forward reads {called}{call.lines[carried.event]}, which an earlier call set; "
                f"{_BUFFER}"
            )
    pairs = enumerate(itertools.zip_longest(second.events, call.events))
    index = next((i for i, (a, b) in pairs if a != b), 0)
    line = call.lines[min(index, len(call.lines) - 1)]
    changed = [key for key, value in after.items() if before.get(key) is not value]
    state = ", ".join(_user_name(rehearsal.run, key) for key in changed[:3])
    why = f"; calls change {state}" if state else ""
    return CaptureError(f"two calls of the model with the same batch differ{line}{why}: {_BUFFER}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _user_name(run: nn.Module, key: tuple[str, ...]) -> str:
    """Return the user's name of an attribute: `layer.h (Layer)`, or `h[0] (Model)`."""
    module = dict(run.named_modules())[key[0]]
    root, _, path = key[0].partition(".")
    path = path if root == "model" else key[0]
    name = ".".join(filter(None, (path, key[1]))) + "".join(f"[{item}]" for item in key[2:])
    return f"{name} ({type(module).__name__})"


def generators_of(run: nn.Module) -> dict[str, Any]:
    """Return random generators by name: Python's, numpy's, and all in attributes and globals."""
    found: dict[str, Any] = {"random": random._inst, "numpy.random": np.random.mtrand._rand}
    files: set[str] = set()
    for name, module in run.named_modules():
        files.add(type(module).__module__)
        for attribute, value in vars(module).items():
            if isinstance(value, _GENERATORS):
                found[f"{name.partition('.')[2]}.{attribute}".lstrip(".")] = value
            elif callable(value):
                files.add(getattr(value, "__module__", None) or "torch.")
    for file in files:
        if file.startswith("torch."):
            continue
        for name, value in list(vars(sys.modules.get(file, random)).items()):
            if isinstance(value, _GENERATORS) and value is not found["random"]:
                found[name] = value
    return found


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def _states(generators: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _state_of(generator) for name, generator in generators.items()}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr([np.asarray(part).tobytes() for part in generator.get_state(legacy=True)])
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


@contextmanager
def restore_generators(generators: Mapping[str, Any]) -> Iterator[None]:
    """Restore the present states of the generators on exit."""
    undo: list[Callable[[], None]] = []
    for generator in generators.values():
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            undo.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(generator, np.random.RandomState):
            undo.append(partial(generator.set_state, generator.get_state()))
        elif not isinstance(generator, random.SystemRandom):
            undo.append(partial(generator.setstate, generator.getstate()))
    try:
        yield
    finally:
        for restore in undo:
            restore()


@contextmanager
def _watch_lines(value: Callable[[], object]) -> Iterator[list[str]]:
    """Collect " at file:line" for every line of the user's code after which `value` differs."""
    lines: list[str] = []
    last, line = value(), ""

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last, line
        if not is_user_code(frame.f_code.co_filename):
            return None
        if (now := value()) != last:
            last = now
            lines.append(line)
        line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        return watch

    previous = sys.gettrace()
    sys.settrace(watch)
    try:
        yield lines
    finally:
        sys.settrace(previous)
