"""Asks a device whether it runs an operator, and checks the answer."""

from __future__ import annotations

import torch
from torch import fx

from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import MissingOperator, graph_calls, operator_name


def refusal(device: Device, node: fx.Node) -> str | None:
    """Return the reason why a device cannot run a node, or None.

    Raises `BackendError` if `supports` of the device fails, or returns neither a text nor None.
    """
    device_id, backend = device.info.id, device.info.backend
    if isinstance(node.target, MissingOperator):
        return f"torch {torch.__version__} in this environment has no such operator"
    try:
        reason = device.supports(node)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(
            f"backend {backend!r}: supports of device {device_id} fails for {operator_name(node)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if reason is None or isinstance(reason, str):
        return reason
    raise BackendError(
        f"backend {backend!r}: supports of device {device_id} returns {reason!r} for "
        f"{operator_name(node)}; it must return None if the device runs the node, else a text with "
        "the reason why not"
    )


def require_support(device: Device, graph: fx.GraphModule) -> None:
    """Raise `UnsupportedOperatorError` for the first node that `device` refuses."""
    for node in graph_calls(graph):
        reason = refusal(device, node)
        if reason is not None:
            where = f" of layer {node.meta['layer']}" if "layer" in node.meta else ""
            raise UnsupportedOperatorError(
                f"{device.info.id} cannot run {operator_name(node)}{where}: {reason}"
            )
