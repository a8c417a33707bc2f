"""Attention and LSTM layers in the form for GPUs, on the devices of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from found_devices import trace
from hetpipe.backends.opencl.lower.lowering import lower
from oclgrind import ORACLE, log_of
from opencl_devices import IDS, close_to_torch, results
from test_opencl_gpu_form import as_gpu, is_interpreted
from test_opencl_lstm import layer

import hetpipe.sdk.operators.recurrent  # noqa: F401
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.operators.attention import plain_attention

pytestmark = pytest.mark.parametrize("device_id", IDS)
own = torch.ops.hetpipe
SCALE = 0.3
CASES = {
    "causal": ((2, 3), 70, 70, 64, 64, True),
    "narrow": ((2,), 130, 7, 5, 20, True),
    "several slices": ((1, 1), 7, 70, 200, 140, False),
}
"""Leading sizes, queries, keys, widths of queries and of values, and whether it is causal."""


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_attention(device_id: str, name: str) -> None:
    lead, queries, keys, depth, width, causal = CASES[name]
    if is_interpreted(device_id):
        pytest.skip("an interpreter would take minutes")
    device = as_gpu(device_id)
    q, k, v, grad = tensors(
        (*lead, queries, depth), (*lead, keys, depth), (*lead, keys, width), (*lead, queries, width)
    )

    def backward(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients: tuple[torch.Tensor, ...] = own.attention_backward(*xs, causal, SCALE)
        return gradients

    close_to_torch(device, lambda *xs: own.attention(*xs, causal, SCALE), q, k, v)
    out, logsumexp = plain_attention(q, k, v, causal, SCALE)
    inputs = grad, q, k, v, out.contiguous(), logsumexp
    close_to_torch(device, backward, *inputs)
    first, second = results(device, backward, *inputs), results(device, backward, *inputs)
    assert all((one == other).all() for one, other in zip(first, second, strict=True))


@pytest.mark.slow
def test_attention_of_interleaved_heads(device_id: str) -> None:
    """The heads of a row are side by side in memory, as after a linear layer."""
    (x,) = tensors((2, 20, 3 * 32) if is_interpreted(device_id) else (2, 70, 3 * 32))

    def fn(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in x.chunk(3, -1))
        out: torch.Tensor = own.attention(q, k, v, True, SCALE)[0]
        return out.transpose(1, 2).flatten(2)

    close_to_torch(as_gpu(device_id), fn, x)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 1, 5), (2, 13, 33), (2, 40, 68)], ids=str)
def test_lstm(device_id: str, sizes: tuple[int, int, int]) -> None:
    if is_interpreted(device_id) and sizes != (3, 1, 5):
        pytest.skip("an interpreter would take minutes")
    device, inputs = as_gpu(device_id), layer(*sizes)
    *states, w_hh = inputs
    close_to_torch(device, own.lstm, *inputs)
    turned = w_hh.t().contiguous()
    close_to_torch(device, lambda *xs: own.lstm(*xs[:-1], xs[-1].t()), *states, turned)
    y, c, gates = own.lstm(*inputs)
    c0 = states[2]
    for last_c in (torch.randn_like(c0), None):
        close_to_torch(
            device,
            lambda *xs, last_c=last_c: own.lstm_backward(
                xs[0], None if last_c is None else xs[1], *xs[2:]
            ),
            torch.randn_like(y), c0 if last_c is None else last_c, gates, c, c0, w_hh,
        )  # fmt: skip


def test_each_step_of_an_lstm_is_a_launch_of_whole_work_groups(device_id: str) -> None:
    inputs = layer(3, 13, 33)
    graph = trace(own.lstm, inputs, get_backend("opencl").decompositions())
    launches = lower(graph, as_gpu(device_id).target).launches
    assert [launch.kernel.name for launch in launches] == ["lstm"] * 3
    assert all(launch.local_size == (16, 16) for launch in launches)


CHECKED = """
import torch
from as_gpu import AsGpu
from opencl_devices import close_to_torch
from test_opencl_lstm import layer
from hetpipe.sdk.operators.attention import plain_attention
own, backend = torch.ops.hetpipe, AsGpu()
device = backend.open(next(info for info in backend.discover() if "oclgrind" in info.id))
def x(seed, *shape): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
q, k, v = x(1, 1, 67, 5), x(2, 1, 66, 5), x(3, 1, 66, 3)
out, sums = plain_attention(q, k, v, True, 0.3)
close_to_torch(device, lambda q, k, v: own.attention(q, k, v, True, 0.3), q, k, v)
close_to_torch(device, lambda *xs: own.attention_backward(*xs, True, 0.3), out, q, k, v, out, sums)
inputs = layer(2, 3, 5)
y, c, gates = own.lstm(*inputs)
close_to_torch(device, own.lstm, *inputs)
close_to_torch(device, own.lstm_backward, y, inputs[2], gates, c, inputs[2], inputs[3])
"""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_no_races_and_no_access_outside(device_id: str, tmp_path: Path) -> None:
    if device_id != IDS[0]:
        pytest.skip("Oclgrind is one device")
    assert log_of(CHECKED, tmp_path, "OCLGRIND_DATA_RACES") == ""
