"""torch's own database of operators: their samples, forward and backward, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from hetpipe.conformance.check import CHECKS, BrokenRule, Check, Level, NotAsked
from hetpipe.conformance.rig import Array, Rig, compare, in_float64, tensors_of, tolerance, trace
from hetpipe.sdk.graph import graph_calls

SAMPLES = 3
"""Samples of an operator that are tried: the first ones that can be traced."""
RANDOM = ("empty", "rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "cauchy")
"""Words in the names of operators whose results are random, or not initialised."""


def _entries() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [entry for entry in op_db if torch.float32 in entry.dtypes]


def _named(name: str) -> Any:
    return next(entry for entry in _entries() if entry.formatted_name == name)


def _check(name: str, rig: Rig) -> None:
    entry = _named(name)
    tried, refused = 0, ""
    torch.manual_seed(0)  # samples are random: these are the same ones every time
    for sample in entry.sample_inputs("cpu", torch.float32, requires_grad=False):
        tensors = tensors_of([sample.input, *sample.args, *sample.kwargs.values()])
        fn = _function(entry, sample)
        try:
            if _sample(rig, fn, tensors, entry.supports_autograd):
                tried += 1
        except NotAsked as reason:
            refused = str(reason)
        if tried == SAMPLES:
            return
    if not tried:
        raise NotAsked(refused or "no sample of it can be traced")


def _function(entry: Any, sample: Any) -> Callable[..., Any]:
    """The operator as a function of all tensors of a sample, in order."""

    def fn(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)

        def filled(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(given)
            if isinstance(value, (list, tuple)):
                return type(value)([filled(each) for each in value])
            return value

        first, args = filled(sample.input), filled(list(sample.args))
        kwargs = {key: filled(value) for key, value in sample.kwargs.items()}
        return entry.op(first, *args, **kwargs)

    return fn


def _sample(
    rig: Rig, fn: Callable[..., Any], tensors: list[torch.Tensor], differentiable: bool
) -> bool:
    """Check one sample, with its gradients where there are any; whether it could be traced."""
    tensors = [tensor.detach() for tensor in tensors]
    wide = _or_none(in_float64, fn, tensors)
    plain = _or_none(lambda: [each.numpy() for each in tensors_of(fn(*tensors))])
    if wide is None or plain is None or not wide or any(a.dtype.kind == "c" for a in plain):
        return False
    ways = [(fn, wide, plain)]
    if differentiable and (backward := _backward(fn, tensors)) is not None:
        ways.append(backward)
    for way, expected, by_torch in ways:
        graph = _or_none(trace, way, tensors, rig.table)
        if graph is None or any(map(_is_random, graph_calls(graph))):
            return False
        rig.require(graph)
        actual = rig.results(rig.device.compile(graph), *tensors)
        terms = max([tensor.numel() for tensor in tensors], default=1) or 1
        for index, (array, right, near) in enumerate(zip(actual, expected, by_torch, strict=True)):
            forms = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
            limit = tolerance(right, near.dtype.name, terms)
            if near.dtype.kind == "f":  # some functions are ill-conditioned, for torch as well
                limit = max(limit, 8 * _worst(near, right))
            gradient = "" if way is fn else "gradient "
            compare(array, right, limit, f"{gradient}{index} of inputs {forms}")
    return True


def _is_random(node: fx.Node) -> bool:
    """Whether an operator draws numbers, of which a device has its own."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _backward(
    fn: Callable[..., Any], tensors: list[torch.Tensor]
) -> tuple[Callable[..., Any], list[Array], list[Array]] | None:
    """The gradients by all floating inputs, as a function, in float64, and as torch has them."""
    places = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def gradients(*tensors: torch.Tensor) -> Any:
        inputs = [t.detach().requires_grad_(i in places) for i, t in enumerate(tensors)]
        with torch.enable_grad():
            results = [t for t in tensors_of(fn(*inputs)) if t.requires_grad]
            total = torch.stack([(each * each).sum() for each in results]).sum()
            return torch.autograd.grad(total, [inputs[i] for i in places], allow_unused=True)

    wide = _or_none(in_float64, gradients, tensors)
    plain = _or_none(lambda: [each.numpy() for each in tensors_of(gradients(*tensors))])
    if not wide or not plain or len(wide) != len(plain):
        return None
    return gradients, wide, plain


def _worst(near: Array, right: Array) -> float:
    if near.shape != right.shape:
        raise BrokenRule(f"torch itself gives {near.shape}, in float64 {right.shape}")
    error = abs(near.astype("float64") - right)
    finite = error[error < math.inf]
    return float(finite.max()) if finite.size else 0.0


def _or_none(function: Callable[..., Any], *args: Any) -> Any:
    """The result; None where torch itself cannot do it."""
    try:
        return function(*args)
    except NotAsked:
        return None
    except Exception:
        return None


@cache
def add_checks() -> None:
    """A check for each operator of the database, where torch's test suite can be imported."""
    try:
        names = [entry.formatted_name for entry in _entries()]
    except ImportError as error:
        CHECKS.append(Check("database/all", Level.FULL, "", "", partial(_missing, str(error))))
        return
    for name in dict.fromkeys(names):
        if not any(word in name for word in RANDOM):
            CHECKS.append(
                Check(
                    f"database/{name}",
                    Level.FULL,
                    "an operator that `supports` accepts computes what torch does, at the samples "
                    "of torch's own operator database and in their gradients",
                    "the kernel of the operator, or of one that it is decomposed into",
                    partial(_check, name),
                    "torch's database",
                )
            )


def _missing(reason: str, rig: Rig) -> None:
    cure = "pip install 'hetpipe[conformance]'"
    raise NotAsked(f"torch's operator database cannot be imported: {reason}; {cure}")
