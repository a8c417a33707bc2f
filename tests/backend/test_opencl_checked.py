"""Kernels under Oclgrind: no access outside a tensor, no race, no uninitialised read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest
from oclgrind import ORACLE, log_of, poison
from opencl_devices import opened_here

GRAPHS = """
import numpy as np, torch
from opencl_devices import close_to_torch, opened_here
device = opened_here(ORACLE)
def x(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(1))
close_to_torch(device, lambda a, b: (a.t() + b[:, None], torch.cat([a, a * 2], 1)[:, 3:]), x(5, 19), x(19))
close_to_torch(device, lambda a: torch.nn.functional.pad(a, (1, 2, 3, 0), value=2.0).exp(), x(3, 17))
close_to_torch(device, lambda t, i: torch.nn.functional.embedding(i, t) * 2, x(5, 18), torch.tensor([[1, 4], [0, 4]]))
close_to_torch(device, lambda a: (a * 2 + 1, (a > 0).to(torch.int64)), x(37))
"""  # noqa: E501 - one graph a line
SUMS = """
close_to_torch(device, lambda a: (a.sum((0, 2)), a.mean(), a.var(1), a.amax((1, 2)), a.argmax(1)), x(3, 4, 33))
"""  # noqa: E501 - one graph a line
CONVOLUTIONS = """
from oclgrind import poison
poison(device)
aten = torch.ops.aten
def convolution(xs, ws, *settings):
    w, i = x(*ws), x(*xs)
    dy = x(*aten.convolution(i, w, None, *settings).shape)
    close_to_torch(device, lambda i, w: aten.convolution(i, w, None, *settings), i, w)
    close_to_torch(device, lambda d, i, w: tuple(aten.convolution_backward(d, i, w, None, *settings, [True, True, False])[:2]), dy, i, w)
convolution((2, 5, 4, 3), (14, 5, 1, 1), [2, 1], [0, 0], [1, 1], False, [0, 0], 1)
convolution((2, 4, 5, 3), (12, 2, 3, 2), [1, 2], [1, 1], [1, 1], False, [0, 0], 2)
convolution((1, 10, 3, 5), (3, 10, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
convolution((2, 4, 2, 3), (26, 4, 3, 3), [1, 2], [1, 1], [1, 1], False, [0, 0], 1)
"""  # noqa: E501 - one graph a line
ATTENTION = """
import hetpipe.sdk.operators.attention
own = torch.ops.hetpipe
def attention(queries, keys, depth, width, causal):
    heads = x(1, 2, queries, depth), x(1, 2, keys, depth), x(1, 2, keys, width)
    out, lse = own.attention(*heads, causal, 0.3)
    close_to_torch(device, lambda q, k, v: own.attention(q, k, v, causal, 0.3), *heads)
    operands = x(*out.shape), *heads, out.contiguous(), lse
    close_to_torch(device, lambda *all: own.attention_backward(*all, causal, 0.3), *operands)
attention(3, 18, 5, 2, False)
attention(70, 67, 3, 17, True)
attention(2, 19, 3, 2, True)
"""
LSTM = """
import hetpipe.sdk.operators.recurrent
own = torch.ops.hetpipe
def lstm(steps, samples, hidden):
    inputs = x(steps, samples, 4 * hidden), x(samples, hidden), x(samples, hidden), x(4 * hidden, hidden)
    close_to_torch(device, own.lstm, *inputs)
    y, c, gates = own.lstm(*inputs)
    for last_c in (x(samples, hidden), None):
        back = lambda y, g, c, c0, w, *last: own.lstm_backward(y, *(last or [None]), g, c, c0, w)
        close_to_torch(device, back, y, gates, c, *inputs[2:], *([] if last_c is None else [last_c]))
lstm(2, 1, 3)
lstm(2, 5, 17)
lstm(1, 13, 33)
"""  # noqa: E501 - one graph a line
PRODUCTS = """
import itertools
from found_devices import fetch, trace
from opencl_devices import upload
from hetpipe.sdk.graph import graph_inputs
from hetpipe.sdk.host.registry import get_backend
a, b = x(25, 40), x(40, 33)
forms = torch.mm, lambda a, b: torch.mm(a.t(), b), lambda a, b: torch.mm(a, b.t()), lambda a, b: torch.mm(a.t(), b.t())
for form, weights in itertools.product(range(4), ((), (0,), (1,), (0, 1))):
    inputs = a.t().contiguous() if form & 1 else a, b.t().contiguous() if form & 2 else b
    graph = trace(forms[form], inputs, get_backend("opencl").decompositions())
    for each in weights:
        graph_inputs(graph)[each].meta["steady"] = True
    (buffers, events), executable = upload(device, *inputs), device.compile(graph)
    for _ in range(3):
        (out,), event, _ = executable.run(buffers, after=events)
    wide = forms[form](*(each.double() for each in inputs))
    torch.testing.assert_close(torch.from_numpy(fetch(device, out, [event])).double(), wide, rtol=0, atol=1e-4)
"""  # noqa: E501 - one graph a line
ONE_KERNEL = """
import numpy as np
from opencl_devices import opened_here
from hetpipe.backends.opencl.lower.launch import Kernel
import pyopencl as cl
device = opened_here(ORACLE)
kernel = Kernel("__kernel void out(__global float *a) { BODY }", "out")
device.programs.prepare([kernel])
ready = device.programs.kernel(kernel)
memory = device.memory.take(64)
cl.enqueue_fill_buffer(device.queue, memory.cl, np.float32(2), 0, 64)
ready.set_arg(0, memory.cl)
cl.enqueue_nd_range_kernel(device.queue, ready, (1,), (1,))
device.queue.finish()
"""
BLIND = {
    "Unsupported instruction: freeze": "const int n = a[0], m = a[1]; a[2] = n / m; a[3] = n % m;",
    "Uninitialized value written": "vstore2((float2)(vload2(0, a).x, vload2(1, a).y), 2, a);",
}
"""Wrong reports of Oclgrind's check for uninitialised reads, each with a right kernel.

Oclgrind ends a kernel that computes a quotient and its remainder, and treats the second of two
vectors as unwritten.
"""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_generated_kernels_are_clean(tmp_path: Path) -> None:
    assert log_of(GRAPHS, tmp_path, "OCLGRIND_DATA_RACES", "OCLGRIND_UNINITIALIZED") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_generated_reductions_are_clean(tmp_path: Path) -> None:
    """Oclgrind's check for uninitialised reads crashes on an instruction in these kernels."""
    assert log_of(GRAPHS + SUMS, tmp_path, "OCLGRIND_DATA_RACES") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_convolutions_are_clean(tmp_path: Path) -> None:
    """The kernels contain the code in `BLIND`, so unwritten memory is NaN, which would show."""
    head = GRAPHS[: GRAPHS.index("close_to_torch(")]
    assert log_of(head + CONVOLUTIONS, tmp_path, "OCLGRIND_DATA_RACES") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_products_are_clean(tmp_path: Path) -> None:
    """Either operand may be a weight, packed ahead; other operands are packed by the product."""
    head = GRAPHS[: GRAPHS.index("close_to_torch(")]
    assert log_of(head + PRODUCTS, tmp_path, "OCLGRIND_DATA_RACES") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_attention_is_clean(tmp_path: Path) -> None:
    """The shapes have incomplete tiles, more keys than queries read, and two blocks."""
    head = GRAPHS[: GRAPHS.index("close_to_torch(")]
    assert log_of(head + ATTENTION, tmp_path, "OCLGRIND_DATA_RACES") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_lstm_layers_are_clean(tmp_path: Path) -> None:
    """The shapes have one row, rows and units that fill no tile, and several groups of rows."""
    head = GRAPHS[: GRAPHS.index("close_to_torch(")]
    assert log_of(head + LSTM, tmp_path, "OCLGRIND_DATA_RACES") == ""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_a_fault_is_detected(tmp_path: Path) -> None:
    assert "Invalid write" in log_of(ONE_KERNEL.replace("BODY", "a[999] = 1.0f;"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
@pytest.mark.parametrize("report", BLIND)
def test_oclgrind_misreports_uninitialised_reads(tmp_path: Path, report: str) -> None:
    """If this fails, Oclgrind has improved: let it check convolutions for uninitialised reads."""
    code = ONE_KERNEL.replace("BODY", BLIND[report])
    assert log_of(code, tmp_path) == ""
    assert report in log_of(code, tmp_path, "OCLGRIND_UNINITIALIZED")


@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_unwritten_memory_is_not_a_number() -> None:
    device = opened_here(ORACLE)
    poison(device)
    array = np.zeros(4, "float32")
    cl.enqueue_copy(device.queue, array, device.memory.take(4096).cl)
    assert np.isnan(array).all()
