"""Cases of attention, causal or not, with gradients; most sizes do not fill a kernel's tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import hetpipe.sdk.operators.attention
import hetpipe.sdk.operators.masked_attention  # noqa: F401 - both register operators
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


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Run attention with a bias; biases above 0.5 hide a key, except the first of a row."""
    not_first = torch.arange(bias.shape[-1], device=bias.device) > 0
    bias = bias.masked_fill((bias > 0.5) & not_first, -math.inf)
    out, logsumexp = own.masked_attention(query, key, value, bias, 0.3)
    return torch.cat([out, logsumexp.detach().unsqueeze(-1)], -1)


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
# Each row: front dimensions, front of the bias, queries, keys, width of query and key, of value.
MASKED = [
    ((2, 3), (2, 1, 1), 5, 7, 4, 4),
    ((2, 3), (1, 1, 5), 5, 5, 3, 3),
    ((2, 2), (1, 2, 13), 13, 21, 8, 8),
    ((1, 2), (1, 1, 3), 3, 9, 5, 2),
    ((2, 2), (2, 2, 64), 64, 96, 32, 32),
]
for front, over, queries, keys, depth, width in MASKED:
    heads = (r(*front, queries, depth), r(*front, keys, depth), r(*front, keys, width))
    for count in (3, 4):  # with a gradient of the bias or without
        case(
            f"masked_{'x'.join(map(str, over))}_{queries}x{keys}x{depth}x{width}_{count}",
            grads(masked, count), *heads, r(*over, keys), r(*front, queries, width + 1),
            terms=max(queries, keys), large=queries >= 64,
        )  # fmt: skip
