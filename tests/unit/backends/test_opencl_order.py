"""The order of lowering: masks and copies before first readers, results after operands."""

from __future__ import annotations

from typing import Any

import torch
from hetpipe.backends.opencl.lower.lowering import order
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.graph import canonical, operator_name

KEPT = torch.ops.hetpipe.keep_mask.default


def names(fn: Any, *inputs: torch.Tensor) -> list[str]:
    graph: fx.GraphModule = canonical(make_fx(fn)(*inputs))
    return [operator_name(node).split(".")[1] for node in order(graph)]


def test_masks_and_copies_come_at_their_first_reader() -> None:
    """Order the masks and copies that a backward repeats; the trace has them first."""

    def backward(x: torch.Tensor, w: torch.Tensor, saved: torch.Tensor, rng: torch.Tensor) -> Any:
        mask = KEPT(rng, 0, [4, 4], 0.5, 0, 4).to(torch.float32)
        copied = saved.view(2, 2, 4).permute(1, 0, 2).reshape(4, 4)
        scaled = saved * 2
        x = torch.mm(torch.mm(x, w), scaled)
        x = torch.mm(x, w) * mask
        return (torch.mm(x, copied),)

    square = torch.ones(4, 4)
    rng = torch.zeros(3, dtype=torch.int64)
    found = names(backward, square, square.clone(), square.clone(), rng)
    assert found == [
        "mm", "mul", "mm", "mm", "keep_mask", "_to_copy", "mul", "view", "permute", "clone",
        "_unsafe_view", "mm",
    ]  # fmt: skip


def test_elementwise_results_come_directly_after_their_operands() -> None:
    def backward(x: torch.Tensor, w: torch.Tensor, sums: torch.Tensor) -> Any:
        y = torch.mm(x, w)
        z = torch.mm(y, w)
        return z, sums + y

    square = torch.ones(4, 4)
    assert names(backward, square, square.clone(), square.clone()) == ["mm", "add", "mm"]
