"""Exports a module and a loss to one functional graph of ATen operators.

Operators with a special derivative are not decomposed, so the module's gradients stay the same.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.export import ExportedProgram

from hetpipe.capture.export.attributes import (
    clear_caches,
    keep_attributes,
    keep_globals,
    restore_table,
)
from hetpipe.capture.export.decompositions import before_cut
from hetpipe.capture.export.example import Example, call
from hetpipe.capture.export.outputs import tensors_of
from hetpipe.capture.export.unsupported import check_modules, explain, refuse_lost_gradients
from hetpipe.capture.precision import Precision
from hetpipe.capture.slots import drop_assertions, placeholders, results
from hetpipe.errors import CaptureError

aten = torch.ops.aten
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


OutputListener = Callable[[Any], None]


class WithLoss(nn.Module):
    """Maps the leaves of a batch to (loss,), or to (sum, count).

    It calls `seen` with the model's output, whose tensors may have no values. With `has_output` the
    output's tensors that have samples follow the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: Example,
        seen: OutputListener = lambda output: None,
        has_output: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._example = example
        self._seen = seen
        self._has_output = has_output

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _assign_in_place(self):
            return self._losses(leaves)

    def _losses(self, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, y = self._example.rebuild(list(leaves))
        out = run_model(self.model, x)
        self._seen(out)
        outputs = tensors_of(out, len(leaves[0])) if self._has_output else []  # before the loss
        return *scalars_of(run_loss(self.loss_fn, out, y)), *outputs


@contextmanager
def _assign_in_place(run: nn.Module) -> Iterator[None]:
    """On exit, turn an assignment to a buffer into a change of the old tensor in place.

    Export records a buffer that changes in place, but would lose an assignment. A buffer that the
    code creates, such as a table computed at its first use, is removed again.
    """
    tables = [(module._buffers, dict(module._buffers)) for module in run.modules()]
    present = [
        (name, module, key, buffer)
        for name, module in run.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for name, module, key, buffer in present:
        value = module._buffers.get(key)
        if value is buffer:
            continue
        if value is None or value.shape != buffer.shape or value.dtype != buffer.dtype:
            got = "None" if value is None else f"{value.dtype}{list(value.shape)}"
            raise CaptureError(
                f"forward assigns {got} to the buffer {key} of "
                f"{name.partition('.')[2] or 'itself'} ({type(module).__name__}), which is "
                f"{buffer.dtype}{list(buffer.shape)}; keep its shape and dtype"
            )
        with torch.no_grad():
            buffer.copy_(value)
        module._buffers[key] = buffer
    for table, before in tables:
        restore_table(table, before)


def run_model(model: nn.Module, x: Any) -> Any:
    """Return `model(x)`. This function's name in a traceback shows that the model failed."""
    return call(model, x)


def run_loss(loss_fn: Callable[..., Any], out: Any, y: Any) -> Any:
    """Return `loss_fn(out, y)`. This function's name in a traceback shows that the loss failed."""
    return loss_fn(out, y)


def scalars_of(loss: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss,), or (sum, count), as 0-d tensors. Raises `CaptureError` for other losses."""
    if isinstance(loss, tuple) and len(loss) == 2:
        total = _scalar(loss[0], "the loss's sum")
        return total, _scalar(loss[1], "the loss's count", total.dtype)
    return (_scalar(loss, "the loss"),)


def _scalar(value: Any, what: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a 0-d tensor of a dtype, by default float64 if the value is float64, else float32."""
    if isinstance(value, (int, float)) and what == "the loss's count":
        return torch.full((), float(value), dtype=dtype)
    if not isinstance(value, torch.Tensor) or value.ndim != 0:
        got = (
            f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value))
        )
        raise CaptureError(
            f"{what} must be a 0-d tensor, but loss_fn returned {got}; return a mean over samples, "
            "or (sum, count)"
        )
    wide = value.dtype is torch.float64
    return value.to(dtype or (torch.float64 if wide else torch.float32))


def export(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    example: Example,
    samples: int,
    precision: Precision = Precision(),  # noqa: B008 - frozen
    sync_batch_norm: bool = False,
    seen: OutputListener = lambda output: None,
    has_output: bool = False,
) -> ExportedProgram:
    """Export `loss_fn(model(x), y)` for a batch of `samples`, every module in its present mode.

    Export runs without autocast, which would hide the modules' names. Autocast is on later, while
    operators are decomposed; the model's own casts stay. With `sync_batch_norm` batch norms use the
    statistics of all replicas' rows. `seen` and `has_output` are as for `WithLoss`. The result is
    functional. Raises `CaptureError`, which names the user's line.
    """
    check_modules(model, loss_fn)
    try:
        with (
            warnings.catch_warnings(),
            _without_torch_log(),
            torch.enable_grad(),
            refuse_lost_gradients(),
            exportable_modules(),
        ):
            warnings.simplefilter("ignore")  # torch's deprecations do not concern the user
            wrapped = WithLoss(model, loss_fn, example, seen, has_output)
            leaves = tuple(example.tensors(samples))
            with keep_attributes(wrapped), clear_caches(wrapped), keep_globals(wrapped, loss_fn):
                program = torch.export.export(wrapped, leaves, strict=False)
            _inline_regions(program.graph_module)
            _reshape_instead_of_view(program.graph_module)
            if precision.compute is not None:
                _drop_assertions(program.graph_module)
            with (
                torch.backends.mkldnn.flags(enabled=False),  # or torch would insert mkldnn's LSTM
                precision.autocast(),
            ):
                functional: ExportedProgram = program.run_decompositions(
                    before_cut(sync_batch_norm)
                )
                return functional
    except Exception as error:
        raise explain(error) from error


_LOGS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export._trace",
)


@contextmanager
def _without_torch_log() -> Iterator[None]:
    """Suppress the traceback and graph that torch prints: the error names the user's line."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    for name in _LOGS:
        logging.getLogger(name).addFilter(drop)
    try:
        with redirect_stderr(_DropTorchOutput(sys.stderr)):
            yield
    finally:
        for name in _LOGS:
            logging.getLogger(name).removeFilter(drop)


class _DropTorchOutput(io.TextIOBase):
    """A stream that drops the text printed by torch.export, and passes on everything else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") == "torch.export._trace":
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def exportable_modules() -> Iterator[None]:
    """Let torch's modules do only operations that export can record, inside the block.

    An encoder layer in eval mode does not use its fused operator, and distributions do not read the
    values of their arguments.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    validates = Distribution._validate_args
    torch.backends.mha.set_fastpath_enabled(False)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        Distribution.set_default_validate_args(validates)


def _inline_regions(module: fx.GraphModule) -> None:
    """Inline no_grad regions and detach their results: decomposition would drop the regions."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is _AUTOCAST:  # decomposition turns autocast into casts; keep the region
            _inline_regions(operator.attrgetter(node.args[4].target)(module))
        if node.target is not _SET_GRAD:
            continue
        enabled, region, *inputs = node.args
        inner = operator.attrgetter(region.target)(module)
        _inline_regions(inner)
        with graph.inserting_before(node):
            outputs = _copy_region(module, inner, inputs)
            if not enabled:
                outputs = [_detach(graph, output) for output in outputs]
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(outputs[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)
        if not region.users:
            graph.erase_node(region)
    module.recompile()


def _reshape_instead_of_view(module: fx.GraphModule) -> None:
    """Let views copy if they must: a decomposed operator's result may have other strides."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default
            inner.recompile()


def _drop_assertions(module: fx.GraphModule) -> None:
    """Drop export's assertions about dtypes, since autocast changes the dtypes."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            drop_assertions(inner.graph)
            inner.recompile()


def _copy_region(module: fx.GraphModule, inner: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    env: dict[fx.Node, Any] = dict(zip(placeholders(inner.graph), inputs, strict=True))
    for node in inner.graph.nodes:
        if node.op == "get_attr":
            name = f"region{len(list(module.graph.nodes))}_{node.name}"
            setattr(module, name, operator.attrgetter(node.target)(inner))
            env[node] = module.graph.get_attr(name)
            env[node].meta.update(node.meta)
        elif node.op == "call_function":
            env[node] = module.graph.node_copy(node, env.__getitem__)
    return [env[out] if isinstance(out, fx.Node) else out for out in results(inner.graph)]


def _detach(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    node = graph.call_function(aten.detach.default, (value,))
    node.meta.update(value.meta)
    return node
