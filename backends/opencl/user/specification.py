"""User kernels from their specifications: a training runs the kernel that was tested."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from hetpipe.errors import BackendError
from hetpipe.files import path_in
from hetpipe.sdk.formats.kernelspec import KernelSpec, Size, read_spec
from hetpipe.words import short, words

from ..lower.signature import Argument
from .runner import KERNEL
from .user_kernels import Call, OwnKernel, text_of


def kernel_of(path: Path) -> OwnKernel:
    """Return the kernel of a specification, for the operator that the specification names.

    Raises `BackendError` if a file is missing or wrong, or if the specification does not tell
    which input or result of the operator each argument is.
    """
    spec = read_spec(path)
    source = text_of(
        path_in(path.parent, spec.source, BackendError) if spec.source else path.with_suffix(".cl")
    )
    names = KERNEL.findall(source)
    function = spec.function or (names[0] if len(names) == 1 else "")
    if function not in names:
        why = f"there is no kernel {function!r}" if function else "no kernel is named"
        there = ", ".join(names) or "none"
        raise BackendError(f"{path}: {why}; write function = NAME (kernels: {there})")
    _check(spec, path)
    return OwnKernel(
        spec.operator,
        source,
        function,
        arguments=partial(_arguments, spec),
        global_size=partial(_sizes, spec, spec.global_size),
        local_size=partial(_sizes, spec, spec.local_size) if spec.local_size else None,
        applies=partial(_reason, spec),
        options=spec.options_of(spec.cases[0]),
    )


def digest_of(kernels: Sequence[OwnKernel]) -> str:
    """Return a short hash of operators, functions, sources and options."""
    text = repr([(each.operator, each.function, each.source, each.options) for each in kernels])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _check(spec: KernelSpec, path: Path) -> None:
    if not spec.operator:
        raise BackendError(f'{path} names no operator; write operator = "aten.relu.default"')
    if _overload(spec.operator) is None:
        raise BackendError(f"{path}: torch has no operator {short(spec.operator)}")
    if spec.beside:
        raise BackendError(
            f"{path} has a table `beside`, but the kernel of an operator "
            "runs alone; remove the table"
        )
    for name, each in spec.argument.items():
        if each.local is not None:
            raise BackendError(
                f"{path}: {name} is local memory, which a training does not pass as an argument; "
                "declare it inside the kernel"
            )
        if each.shape is None:
            continue
        if each.is_input and each.output:
            raise BackendError(
                f"{path}: {name} is read and written; a kernel for an operator writes only results"
            )
        wanted, have = ("result", each.result) if each.output else ("input", each.input)
        if have is None:
            raise BackendError(
                f"{path}: which {wanted} of {spec.operator} is {name}? Write its place in "
                f"[argument.{name}]; for the first one {wanted} = 0"
            )


def _overload(operator: str) -> object:
    parts = operator.split(".")
    if len(parts) != 3:
        return None
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    return getattr(packet, parts[2], None)


def _reason(spec: KernelSpec, call: Call) -> str | None:
    """Return why the specification does not cover a call, or None if it does."""
    others = [each for each in (*call.args, *call.kwargs.values()) if _is_setting(each)]
    if others:
        return f"it has the argument {short(others[0])}, which the specification does not know"
    try:
        bound(spec, call)
    except BackendError as error:
        return str(error)
    return None


def _is_setting(argument: object) -> bool:
    return argument is not None and not hasattr(argument, "meta")


def bound(spec: KernelSpec, call: Call) -> dict[str, int]:
    """Return the sizes that the specification names, from the shapes of a call.

    If the specification gives an argument one dimension, the tensor may have any rank: it is read
    as one row. Raises `BackendError` if the call does not fit the specification.
    """
    sizes = {name: values[0] for name, values in spec.define.items()}
    later: list[tuple[str, Size, int]] = []
    for name, each in spec.argument.items():
        if each.shape is None:
            continue
        tensors, index = (call.outputs, each.result) if each.output else (call.inputs, each.input)
        assert index is not None, "checked when it was read"
        if index >= len(tensors):
            kind = "result" if each.output else "input"
            raise BackendError(f"{name} is {kind} {index}, counted from 0, of {len(tensors)}")
        tensor = tensors[index]
        if tensor.dtype != each.dtype:
            raise BackendError(f"{name} is {tensor.dtype}, but {each.dtype} in the specification")
        shape = (tensor.numel,) if len(each.shape) == 1 else tensor.shape
        if len(shape) != len(each.shape):
            raise BackendError(
                f"{name} has {len(shape)} dimensions, but {len(each.shape)} in the specification"
            )
        for size, number in zip(each.shape, shape, strict=True):
            if size.name is None:
                later.append((name, size, number))
            elif sizes.setdefault(size.name, number) != number:
                raise BackendError(f"{name} has {size} = {number}, but before {sizes[size.name]}")
    for name in spec.fixed:
        listed = dict.fromkeys(each[name] for each in spec.case if name in each)
        if name in sizes and sizes[name] not in listed:
            raise BackendError(f"{name} is {sizes[name]}, but `fixed` allows {words(listed)}")
    for name, size, number in later:
        if size.value(sizes) != number:
            raise BackendError(f"{name} has {size} = {number}, not {size.value(sizes)}")
    return sizes


def _arguments(spec: KernelSpec, call: Call) -> Mapping[str, Argument]:
    sizes = bound(spec, call)
    arguments: dict[str, Argument] = {}
    for name, each in spec.argument.items():
        if each.value is not None:
            arguments[name] = each.value.value(sizes)
        elif each.number is not None:
            arguments[name] = float(each.number)
        elif each.output:
            assert each.result is not None
            arguments[name] = call.outputs[each.result]
        else:
            assert each.input is not None
            arguments[name] = call.inputs[each.input]
    return arguments


def _sizes(spec: KernelSpec, wanted: Sequence[Size], call: Call) -> tuple[int, ...]:
    sizes = bound(spec, call)
    return tuple(size.value(sizes) for size in wanted)
