"""The operators that a device of torch supports, for a device type that a test registers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hetpipe.backends.pytorch.kernels import has_kernel

CODE = """
from types import SimpleNamespace
import torch
from torch import fx
from hetpipe.backends.pytorch.device import SynchronizedDevice
import hetpipe.sdk.graph

torch.utils.rename_privateuse1_backend("npu")
fallbacks = torch.library.Library("_", "IMPL")
fallbacks.fallback(lambda *args, **kwargs: None, "PrivateUse1")
kernels = torch.library.Library("aten", "IMPL")
for name in ("mm", "add.out", "convolution_overrideable"):
    kernels.impl(name, lambda *args, **kwargs: None, "PrivateUse1")
device = SynchronizedDevice(SimpleNamespace(id="npu:0"), torch.device("npu", 0))
graph = fx.Graph()
for target in (
    torch.ops.aten.mm.default,  # its kernel
    torch.ops.aten.add.Tensor,  # its kernel by `out`
    torch.ops.aten.embedding.default,  # by other operators
    torch.ops.aten.silu_backward.default,
    torch.ops.aten.convolution.default,  # by an operator that is only for it
    torch.ops.hetpipe.keep_mask.default,
    torch.ops.aten.erf.default,  # no kernel, and no kernel by `out`
    torch.ops.aten.convolution_backward.default,  # by an operator that only raises an error
    torch.ops.aten._softmax.default,
    torch.ops.aten.native_batch_norm.default,
):
    print(target, device.supports(graph.call_function(target, ())), sep=": ")
"""
RUN = (
    "mm.default",
    "add.Tensor",
    "embedding.default",
    "silu_backward.default",
    "convolution.default",
)


@pytest.mark.slow
def test_a_fallback_of_all_operators_is_no_kernel() -> None:
    """A new device type has another dispatch key than its name, and every operator of a device
    with a fallback seemed to have a kernel."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(": ") for line in done.stdout.splitlines())
    runs = {name for name, answer in answers.items() if answer == "None"}
    assert runs == {"hetpipe.keep_mask.default", *(f"aten.{name}" for name in RUN)}
    refusals = {answer for answer in answers.values() if answer != "None"}
    assert refusals == {"torch has no kernel of this operator for npu"}


def test_the_processor_has_no_fallback_so_torch_gives_the_same_answers() -> None:
    names = [each for each in torch._C._dispatch_get_all_op_names() if each.startswith("aten::")]
    for name in names:
        operator, _, overload = name.removeprefix("aten::").partition(".")
        target = getattr(getattr(torch.ops.aten, operator), overload or "default")
        asked = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        assert has_kernel(target, "cpu") == asked, name
    assert len(names) > 2000
