"""Rounding noise: random errors of the size that rounding may cause, and their effects."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from hetpipe.check.difference import UNITS, eps_of, largest_of, tensor_difference, tolerance
from hetpipe.check.reference import Value, exact_value, narrow_value, tensors_of, terms_of


def with_rounding_errors(value: Any, generator: torch.Generator, units: float = UNITS) -> Any:
    """Return a floating tensor with a random relative error of up to `units` eps per element.

    Return other values unchanged.
    """
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    noise = _noise(value, generator) * units * eps_of(value.dtype)
    return (value.double() * (1 + noise)).to(value.dtype)


def disturb_node(generator: torch.Generator, node: fx.Node, value: Value) -> Value:
    """Return a node's value with the rounding errors that its operator may have."""
    if isinstance(value, tuple):
        return tuple(disturb_node(generator, node, item) for item in value)
    disturbed = with_rounding_errors(value, generator)
    terms = terms_of(node)
    if disturbed is value or terms == 1 or not value.numel():
        return disturbed
    allowed = tolerance(largest_of(value.double().numpy()), eps_of(value.dtype), terms)
    return (disturbed.double() + _noise(value, generator) * allowed).to(value.dtype)


def rounding_effects(node: fx.Node, arguments: Any, expected: Value) -> list[float]:
    """Return the error that a device may have beyond the tolerance, for each tensor of a value.

    It covers torch's error in the graph's dtypes, and the effect of rounding errors in the inputs,
    which sums with cancelling terms amplify.
    """
    generator = torch.Generator().manual_seed(0)
    units = tolerance(1.0, 1.0, terms_of(node))
    disturb = partial(with_rounding_errors, generator=generator, units=units)
    values = [narrow_value(node, arguments)]
    values += [exact_value(node, tree_map(disturb, arguments)) for _ in range(2)]
    columns = zip(*map(tensors_of, values), strict=True)
    return [
        2 * max(tensor_difference(value, right, 1).error for value in column)
        for column, right in zip(columns, tensors_of(expected), strict=True)
    ]


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers between -1 and 1 in the shape of a tensor."""
    return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
