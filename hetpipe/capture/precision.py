"""Half precision: the dtype of computation in passes, and the dtype of tensors across a cut.

Both become casts in the captured graphs, and the slots show the resulting sizes. Parameters,
gradients and optimizer state keep the model's dtypes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe.capture.program import CUT
from hetpipe.capture.slots import Key, is_tensor
from hetpipe.errors import CaptureError

aten = torch.ops.aten
COMPUTE_DTYPES = ("bfloat16", "float16")
CUT_DTYPES = ("float16",)


@dataclass(frozen=True)
class Precision:
    """The dtypes of passes and cuts; None means the model's own dtype.

    `compute`: the dtype for `torch.autocast`, by its rules for CPUs. `cut`: the dtype in which
    floating tensors and their gradients cross a cut. Raises `CaptureError` for an unsupported
    dtype.
    """

    compute: str | None = None
    cut: str | None = None

    def __post_init__(self) -> None:
        if self.compute not in (None, *COMPUTE_DTYPES):
            raise CaptureError(
                f"precision={self.compute!r} is not known; use one of {', '.join(COMPUTE_DTYPES)}, "
                "or None for the model's own dtypes"
            )
        if self.cut == "bfloat16":
            raise CaptureError(
                "cut_dtype='bfloat16': tensors cross a cut as numpy arrays on the host, and numpy "
                "has no bfloat16; use 'float16', or None (bfloat16 tensors then cross as float32)"
            )
        if self.cut not in (None, *CUT_DTYPES):
            raise CaptureError(f"cut_dtype={self.cut!r} is not known; use 'float16' or None")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which operators are decomposed."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.compute), cache_enabled=False)

    def crossing(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor crosses a cut; numpy has no bfloat16."""
        if not dtype.is_floating_point:
            return dtype
        if self.cut is not None:
            return torch.float16
        return torch.float32 if dtype is torch.bfloat16 else dtype

    def crossing_nbytes(self, node: fx.Node) -> int:
        """Return the bytes of a tensor node where it crosses a cut."""
        value = node.meta["val"]
        return int(value.numel()) * self.crossing(value.dtype).itemsize


def cast_at_cuts(
    graph: fx.Graph, inputs: list[Key], outputs: list[Key], precision: Precision
) -> None:
    """Cast the CUT inputs of a piece from the dtype of the cut, and its CUT outputs to that dtype.

    Autograd then casts their gradients back. A tensor that the piece passes on gets a gradient from
    later pieces and a gradient from this piece; both are added in the tensor's own dtype.
    """
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for key, node in zip(inputs, nodes, strict=True):
        if key[0] == CUT:
            _cast_input(graph, node, nodes[-1], precision)
    output = graph.output_node()
    returned: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    for index, (role, _) in enumerate(outputs):
        node = returned[index]
        crossing = precision.crossing(node.meta["val"].dtype) if is_tensor(node) else None
        if role == CUT and crossing is not None and crossing != node.meta["val"].dtype:
            with graph.inserting_before(output):
                returned[index] = _cast(graph, node, crossing)
    output.args = (tuple(returned),)


def _cast_input(graph: fx.Graph, node: fx.Node, last: fx.Node, precision: Precision) -> None:
    value = node.meta["val"]
    crossing = precision.crossing(value.dtype)
    if crossing == value.dtype:
        return
    with graph.inserting_after(last):
        cast = _cast(graph, node, value.dtype)
    node.replace_all_uses_with(cast, lambda user: user is not cast)
    node.meta = {**node.meta, "val": _like(value, crossing)}


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta["val"] = _like(node.meta["val"], dtype)
    if "layer" in node.meta and node.op != "placeholder":
        cast.meta["layer"] = node.meta["layer"]
    return cast


def _like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(value.shape, dtype=dtype, device="meta")
