"""The example device in C: operators against torch in float64, and the rules of memory."""

from __future__ import annotations

import functools
import gc
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from found_devices import fetch, put, run, trace
from hetpipe.backends.native import include_folder
from native_libraries import EXAMPLE, example, faulty, open_library
from test_operators import check, graph_of, inputs_of, refusal

from hetpipe.check.selftest import selftest
from hetpipe.conformance.cases import CASES, Case
from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import core_decompositions, graph_calls, operator_name


@functools.cache
def open_example() -> Device:
    return open_library(example())


@pytest.fixture(params=["queue", "blocking"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Open the example, or a device that waits in every call and lacks all optional functions."""
    path = example() if request.param == "queue" else faulty("BLOCKING")
    device = open_library(path)
    yield device
    device.close()


def trace_core(fn, *inputs):
    return trace(fn, inputs, core_decompositions())


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator(case: Case) -> None:
    graph = graph_of(case, "native")
    if case.large:
        pytest.skip("made to be right, not fast: small cases only")
    reason = refusal(open_example(), graph)
    if reason is not None:
        pytest.skip(reason)
    check(case, run(open_example(), graph, [t.numpy() for t in inputs_of(case)]), graph)


def names() -> set[str]:
    """Return the operators in the tables of the example."""
    text = "".join((EXAMPLE / name).read_text() for name in ("elements.c", "layers.c"))
    tables = "".join(re.findall(r"_OPERATIONS\[\] = \{(.*?)\n\};", text, re.DOTALL))
    one = {f"{name}.default" for name in re.findall(r'ONE\("(\w+)"', tables)}
    pairs = re.findall(r'TWO\("(\w+)"', tables)
    two = {f"{name}.{kind}" for name in pairs for kind in ("Tensor", "Scalar")}
    return one | two | set(re.findall(r'\{"([\w.]+)"', tables))


@pytest.mark.slow
def test_every_operator_of_the_example_has_a_case() -> None:
    graphs = [graph_of(case, "native") for case in CASES]
    met = {operator_name(node) for graph in graphs for node in graph_calls(graph)}
    assert sorted(name for name in names() if f"aten.{name}" not in met) == []


def test_the_selftest_passes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    result = selftest(device)
    assert result.ok, result.message


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_copies_round_trip(device: Device, shape: tuple[int, ...], dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    np.testing.assert_array_equal(fetch(device, put(device, array)), array)
    turned = array.T  # a non-contiguous array
    np.testing.assert_array_equal(fetch(device, put(device, turned)), turned)


def test_a_missing_dtype_is_refused() -> None:
    with pytest.raises(BackendError, match=r"native:example.cpu:0 has no float64; it has float32"):
        open_example().upload(np.ones(3))


def test_a_missing_operator_is_refused_by_name(device: Device) -> None:
    graph = trace_core(lambda x: torch.cumsum(x, 0), torch.ones(3))
    with pytest.raises(UnsupportedOperatorError, match=r"aten.cumsum.default.*no such operator"):
        device.compile(graph)


def test_a_donated_input_becomes_an_output_and_nothing_else_does(device: Device) -> None:
    graph = trace_core(lambda x, y: (x + y, x - y, x), torch.ones(3), torch.ones(3))
    executable = device.compile(graph)
    x, y = (put(device, np.array(values, np.float32)) for values in ([1, 2, 3], [10, 20, 30]))
    (total, difference, same), event, _ = executable.run([x, y], frozenset({0, 1}))
    event.wait(10)
    assert same is x  # an output that is a placeholder is the same buffer, donated or not
    np.testing.assert_array_equal(fetch(device, x), [1, 2, 3])
    np.testing.assert_array_equal(fetch(device, total), [11, 22, 33])
    np.testing.assert_array_equal(fetch(device, difference), [-9, -18, -27])
    with pytest.raises(BackendError, match="used after it was donated"):
        fetch(device, y)


def test_an_input_given_twice_is_not_donated(device: Device) -> None:
    graph = trace_core(lambda x, y: (x.view(3, 1), x + y), torch.ones(3), torch.ones(3))
    x = put(device, np.array([1, 2, 3], np.float32))
    (view, doubled), event, _ = device.compile(graph).run([x, x], frozenset({0}))
    event.wait(10)  # it was given twice, so it is not donated
    np.testing.assert_array_equal(fetch(device, x), [1, 2, 3])
    np.testing.assert_array_equal(fetch(device, view), [[1], [2], [3]])
    np.testing.assert_array_equal(fetch(device, doubled), [2, 4, 6])


def test_repeated_outputs_and_graphs_without_calls(device: Device) -> None:
    twice = device.compile(trace_core(lambda x: ((y := x + 1), y, x), torch.ones(2)))
    x = put(device, np.zeros(2, np.float32))
    outputs, event, _ = twice.run([x])
    event.wait(10)
    assert outputs[0] is outputs[1]
    assert outputs[2] is x
    nothing = device.compile(trace_core(lambda x, y: (y, x), torch.ones(2), torch.ones(2)))
    y = put(device, np.ones(2, np.float32))
    outputs, event, _ = nothing.run([x, y])
    event.wait(10)
    assert [id(o) for o in outputs] == [id(y), id(x)]


def test_events_alone_order_the_runs() -> None:
    device = open_example()
    step = device.compile(trace_core(lambda x: x @ x * 1e-2, torch.ones(64, 64)))
    x, ready = device.upload(np.ones((64, 64), np.float32))
    for _ in range(50):
        (x,), ready, _ = step.run([x], frozenset({0}), after=[ready])  # earlier buffers are dropped
    ready.wait(20)
    expected = 1.0
    for _ in range(50):
        expected = 64 * expected * expected * 1e-2
    np.testing.assert_allclose(fetch(device, x), np.full((64, 64), expected), rtol=1e-3)


def test_an_index_out_of_range_fails_its_event_and_later_ones() -> None:
    device = open_example()
    zero = torch.tensor([0])
    pick = device.compile(trace_core(lambda x, i: torch.gather(x, 0, i), torch.ones(3), zero))
    add = device.compile(trace_core(lambda x: x + 1, torch.ones(1)))
    x, index = put(device, np.ones(3, np.float32)), put(device, np.array([3]))
    message = r"aten.gather.default of layer \?: index 3 is out of range for size 3"
    (picked,), first, _ = pick.run([x, index])

    def follow() -> None:
        add.run([picked], after=[first])[1].wait(10)

    for wait in (follow, lambda: first.wait(10), first.done):
        with pytest.raises(BackendError, match=message):
            wait()


@pytest.mark.slow
def test_memory_without_references_is_freed(device: Device) -> None:
    step = device.compile(trace_core(lambda x: x + 1, torch.ones(1000)))
    if device.memory_used_nbytes() is None:
        pytest.skip("it counts no memory")
    x = put(device, np.ones(1000, np.float32))
    before = device.memory_used_nbytes()
    for _ in range(20):
        outputs, event, _ = step.run([x])
        event.wait(10)
    assert device.memory_used_nbytes() == before + 4000  # the last output
    del outputs
    gc.collect()
    assert device.memory_used_nbytes() == before


def test_the_device_survives_too_large_a_buffer() -> None:
    device = open_example()
    graph = trace_core(lambda x: x.expand(1 << 20, 1 << 10), torch.ones(1))
    x = put(device, np.ones(1, np.float32))
    with pytest.raises(BackendError, match=r"do not fit|out of memory"):
        device.compile(graph).run([x])[1].wait(10)
    np.testing.assert_array_equal(fetch(device, x), [1])


def test_threads_copy_and_run_at_the_same_time() -> None:
    device = open_example()
    graphs = [trace_core(lambda x, n=n: x * 2 + n, torch.ones(100)) for n in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            executable = device.compile(graphs[number])
            for i in range(30):
                x, ready = device.upload(np.full(100, i, np.float32))
                (y,), done, _ = executable.run([x], frozenset({0}), after=[ready])
                done.wait(20)
                np.testing.assert_array_equal(fetch(device, y), np.full(100, 2 * i + number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_device_keeps_its_remaining_buffers() -> None:
    device = open_library(example())
    buffer = put(device, np.ones(3, np.float32))
    device.close()
    del device
    gc.collect()
    np.testing.assert_array_equal(fetch(buffer.device, buffer), np.ones(3))


def test_the_headers_are_in_the_documented_folder() -> None:
    assert {"hetpipe_backend.h", "hetpipe_graph.h", "hetpipe_graph.c"} <= {
        path.name for path in include_folder().iterdir()
    }
