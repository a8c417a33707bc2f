"""Cases of attention, causal or not, with gradients; most sizes do not fill a kernel's tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hetpipe.sdk.operators.attention  # noqa: F401 - registers the operator
from hetpipe.conformance.cases.case import grads, r, table

case = table("attention")

own = torch.ops.hetpipe


def attention(is_causal: bool) -> Callable[..., Any]:
    """Return a function of (query, key, value, tangent): logsumexp, out and the gradients."""

    def run(*args: torch.Tensor) -> Any:
        out, logsumexp = own.attention(*args[:3], is_causal, 0.3)
        return (logsumexp, out, *backward(*args)[1:])

    backward = grads(lambda *heads: own.attention(*heads, is_causal, 0.3)[0], 3)
    return run


def swapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Split columns into heads, run attention, and join the heads, as models do."""
    heads = [x.view(*x.shape[:2], 2, -1).transpose(1, 2) for x in (query, key, value)]
    result: torch.Tensor = own.attention(*heads, True, 0.5)[0]
    return result.transpose(1, 2).flatten(2)


# Each row: front dimensions, queries, keys, width of query and key, width of value.
SHAPES = [
    ((1, 2), 3, 3, 4, 4),
    ((2,), 5, 5, 3, 3),
    ((1, 2), 7, 13, 5, 9),
    ((2, 1), 13, 7, 5, 2),
    ((1, 1), 1, 1, 1, 1),
]
LARGE = [
    ((2, 3), 128, 128, 64, 64),
    ((2,), 97, 193, 33, 20),
    ((1, 2), 200, 90, 32, 70),
    ((1, 1), 110, 110, 256, 256),
]
for front, queries, keys, depth, width in [*SHAPES, *LARGE]:
    large = (front, queries, keys, depth, width) in LARGE
    heads = (r(*front, queries, depth), r(*front, keys, depth), r(*front, keys, width))
    for causal in (False, True):
        name = f"attention_{queries}x{keys}x{depth}x{width}{'_causal' if causal else ''}"
        longest = max(queries, keys, depth, width)
        tangent = r(*front, queries, width)
        case(name, attention(causal), *heads, tangent, terms=longest, large=large)
case("attention_heads", grads(swapped, 3), *(r(2, 6, 8) for _ in range(4)), terms=8)
