"""The torch backend runs a graph eagerly or as Inductor compiles it, and stores a measured choice.

Most tests replace Inductor by a stand-in, because a real compilation takes seconds.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from found_devices import trace
from hetpipe.backends.pytorch import PyTorchBackend, choice
from hetpipe.backends.pytorch.choice import fastest, times_in_turns
from hetpipe.backends.pytorch.device import TorchBuffer
from hetpipe.backends.pytorch.inductor import compile_program
from hetpipe.backends.pytorch.program import Program, Way
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import graph_calls

CPU = torch.device("cpu")


def step(p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor) -> Any:
    doubled = (p * 2).t()
    return p - lr * g.sigmoid(), torch.zeros_like(g), doubled


P, G, LR = torch.randn(5, 7), torch.randn(5, 7), torch.tensor(0.1)
STEP = trace(step, [P, G, LR], {})


def configured(compile: str) -> PyTorchBackend:
    backend = PyTorchBackend()
    backend.configure({"compile": compile}, Path())
    return backend


def cpu_of(backend: PyTorchBackend) -> Any:
    return backend.open(backend.discover()[0])


def run_step(device: Any, graph: Any = STEP) -> list[torch.Tensor]:
    """Run a step with donated parameter and gradient; return the results."""
    buffers = [device.upload(tensor.numpy())[0] for tensor in (P, G, LR)]
    pointers = {buffer.tensor.data_ptr() for buffer in buffers[:2]}
    outputs, _, _ = device.compile(graph).run(buffers, frozenset({0, 1}))
    assert all(isinstance(buffer, TorchBuffer) for buffer in outputs)
    results = [buffer.tensor for buffer in outputs]
    assert pointers < {tensor.data_ptr() for tensor in results}, "a result is not in place"
    for found, wanted in zip(results, step(P, G, LR), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted)
    return results


class Inductor:
    """A stand-in that counts compilations; its programs run eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.compiled = self.loaded = self.measured = 0
        self.times_s = {"eager": [2.0] * 5, "inductor": [1.0] * 5}
        monkeypatch.setenv("HETPIPE_CACHE", str(cache))
        monkeypatch.setattr(choice, "compile_program", self.compile)
        monkeypatch.setattr(choice, "load_program", self.load)
        monkeypatch.setattr(choice, "times_in_turns", self.measure)
        monkeypatch.setattr(choice, "lacks_compiler", lambda kind: None)
        monkeypatch.setattr("hetpipe.backends.pytorch.options.lacks_compiler", lambda kind: None)

    def compile(self, program: Program, tensors: Sequence[torch.Tensor]) -> tuple[Way, bytes]:
        self.compiled += 1
        return program.call, b"a compiled program"

    def load(self, data: bytes, program: Program) -> Way:
        assert data == b"a compiled program"
        self.loaded += 1
        return program.call

    def measure(self, ways: Any, *_: Any) -> dict[str, list[float]]:
        self.measured += 1
        return {name: self.times_s[name] for name in ways}


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Inductor:
    return Inductor(monkeypatch, tmp_path)


# --- the option ---------------------------------------------------------------------------------


def test_the_option_is_part_of_the_costs_key() -> None:
    drivers = {name: configured(name).discover()[0].driver for name in ("eager", "inductor")}
    assert drivers == {
        "eager": torch.__version__,
        "inductor": f"{torch.__version__}, compile inductor",
    }


def test_another_value_is_refused() -> None:
    with pytest.raises(BackendError, match=r"quickly.*eager.*inductor.*measured"):
        configured("quickly")


def test_a_missing_compiler_is_no_silent_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-compiler-1")
    with pytest.raises(BackendError, match=r"pytorch:cpu:0.*no-compiler-1: apt-get install.*eager"):
        cpu_of(configured("inductor"))
    measured = configured("measured")
    (finding,) = (each for each in measured.describe() if "eagerly" in each[1])
    assert finding[0] == "missing"
    assert "no-compiler-1" in finding[1]
    assert measured.discover()[0].driver == torch.__version__  # costs of the eager way are valid
    run_step(cpu_of(measured))
    assert "eagerly: Inductor needs the C++ compiler no-compiler-1" in caplog.text
    assert not any("eagerly" in text for _, text, _ in configured("eager").describe())


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiled_s", "chosen"),
    [([0.97] * 5, "inductor"), ([0.99] * 5, "eager"), ([0.5, 0.5, 2, 2, 2], "eager")],
)
def test_another_way_must_be_faster_by_a_margin(compiled_s: list[float], chosen: str) -> None:
    assert fastest({"eager": [1.0] * 5, "inductor": compiled_s}) == chosen


def test_a_comparison_restores_donated_inputs_and_takes_turns() -> None:
    order: list[str] = []

    def way(name: str) -> Way:
        def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            order.append(name)
            tensors[1].add_(1)
            return []

        return run

    tensors = [torch.ones(3), torch.arange(3.0)]
    ways = {"eager": way("eager"), "inductor": way("inductor")}
    times_s = times_in_turns(ways, tensors, frozenset({1}), lambda: None)
    assert tensors[1].tolist() == [0, 1, 2]
    first_runs, runs = order[:4], order[4:]
    assert first_runs == ["eager", "eager", "inductor", "inductor"]
    assert runs == ["eager", "inductor"] * (len(runs) // 2)
    assert len(times_s["eager"]) == len(times_s["inductor"]) >= choice.LEAST


@pytest.mark.parametrize(("inductor_s", "loads"), [(1.0, 1), (3.0, 0)])
def test_a_second_start_measures_and_compiles_nothing(
    inductor: Inductor, inductor_s: float, loads: int
) -> None:
    inductor.times_s["inductor"] = [inductor_s] * 5
    run_step(cpu_of(configured("measured")))
    assert (inductor.compiled, inductor.measured, inductor.loaded) == (1, 1, 0)
    run_step(cpu_of(configured("measured")))
    assert (inductor.compiled, inductor.measured, inductor.loaded) == (1, 1, loads)
    run_step(cpu_of(configured("inductor")))  # both options share compiled programs
    assert (inductor.compiled, inductor.loaded) == (1, loads + 1)


def test_other_graphs_threads_and_donations_are_other_choices(inductor: Inductor) -> None:
    device = cpu_of(configured("measured"))
    run_step(device)
    other = trace(lambda p, g, lr: step(p, g, lr * 1), [P, G, LR], {})
    run_step(device, other)
    assert inductor.measured == 2
    buffers = [device.upload(tensor.numpy())[0] for tensor in (P, G, LR)]
    device.compile(STEP).run(buffers)
    assert inductor.measured == 3
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run_step(device)
    finally:
        torch.set_num_threads(threads)
    assert inductor.measured == 4


def test_workers_that_measure_at_once_follow_the_first_choice(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of equal replicas are equal bit for bit, so both must run the same way."""

    def late(ways: Any, *_: Any) -> dict[str, list[float]]:
        monkeypatch.setattr(choice, "times_in_turns", inductor.measure)
        run_step(cpu_of(configured("measured")))  # another worker ends first, and takes inductor
        return {"eager": [1.0] * 5, "inductor": [2.0] * 5}

    monkeypatch.setattr(choice, "times_in_turns", late)
    device = cpu_of(configured("measured"))
    run_step(device)
    inductor.measured = 0
    run_step(device)
    assert (inductor.measured, inductor.loaded) == (0, 2)


def test_a_graph_that_inductor_cannot_compile(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no lowering\nand a long trace")

    monkeypatch.setattr(choice, "compile_program", fail)
    with pytest.raises(BackendError, match=r"cannot compile a graph of \d oper.*no lowering; set"):
        run_step(cpu_of(configured("inductor")))
    with caplog.at_level(logging.WARNING):
        run_step(cpu_of(configured("measured")))
    assert "no lowering" in caplog.text


def test_a_full_disk_is_named_as_the_reason(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("C++ compile error\n\ng++ ...\nx.s: No space left on device\nthe end")

    monkeypatch.setattr(choice, "compile_program", fail)
    with pytest.raises(BackendError, match=r"error: x.s: No space left on device; set"):
        run_step(cpu_of(configured("inductor")))


def test_an_error_during_a_comparison_names_the_device(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(choice, "times_in_turns", fail)
    with pytest.raises(BackendError, match="pytorch:cpu:0: no memory"):
        run_step(cpu_of(configured("measured")))


def test_graphs_that_check_indices_run_eagerly(inductor: Inductor) -> None:
    """Inductor's kernels do not name a wrong index, and may end the process."""
    table, index = torch.randn(4, 2), torch.tensor([1, 9])
    graph = trace(lambda t, i: t[i] * 2, [table, index % 4], {})
    device = cpu_of(configured("inductor"))
    with pytest.raises(BackendError, match="index 9 is out of range for size 4"):
        device.compile(graph).run([device.upload(each.numpy())[0] for each in (table, index)])
    assert inductor.compiled == 0
    graph.graph.find_nodes(op="placeholder")[1].meta["checked"] = (0, 4, None)
    device.compile(graph).run([device.upload(each.numpy())[0] for each in (table, index % 4)])
    assert inductor.compiled == 1


def test_graphs_with_a_users_function_run_eagerly(inductor: Inductor) -> None:
    class Mine(PyTorchBackend):
        name = "mine"
        operators = {"aten.sigmoid.default": torch.sigmoid}  # noqa: RUF012

    backend = Mine()
    backend.configure({"compile": "inductor"}, Path())
    run_step(cpu_of(backend))
    assert inductor.compiled == 0


def test_layers_with_a_workspace_run_eagerly(inductor: Inductor) -> None:
    """A compiled forward would leave no workspace of oneDNN to the backward."""
    inputs = [torch.randn(s) for s in ((3, 2, 5), (2, 4), (2, 4), (16, 5), (16, 4), (16,))]
    graph = trace(lambda *each: tuple(torch.ops.hetpipe.lstm_layer(*each)[:2]), inputs, {})
    device = cpu_of(configured("inductor"))
    device.compile(graph).run([device.upload(each.numpy())[0] for each in inputs])
    assert inductor.compiled == 0


def test_a_compiler_gets_no_writes_into_strided_views() -> None:
    """Inductor cannot carry such a write over to the whole tensor."""

    def heads(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        swapped = (x @ x.t()).view(2, 3, 6).transpose(0, 1)
        return (z * swapped).reshape(6, 6) + 1

    def steps(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return heads(x, z.exp()), z.permute(2, 0, 1).sigmoid().sum(0), x * 2

    inputs = [torch.randn(6, 4), torch.randn(3, 2, 6)]
    program = Program(trace(steps, inputs, {}), frozenset({0, 1}), CPU, "test")
    functional = program.functional()
    values = [value.clone() for value in inputs]
    found = functional(values)
    for left, right in zip(found, steps(*inputs), strict=True):
        torch.testing.assert_close(left, right)
    assert found[2].data_ptr() == values[0].data_ptr(), "it is not in the donated input"

    def overwritten(way: Way) -> set[str]:
        """Return the operations of the values that the program overwrites."""
        module = make_fx(lambda *given: way(given))(*inputs)
        return {
            value.op
            for node in graph_calls(module)
            for value, argument in zip(node.args, node.target._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        } | {node.kwargs["out"].op for node in module.graph.nodes if "out" in node.kwargs}

    assert overwritten(functional) == {"placeholder"}
    assert overwritten(program.call) == {"placeholder", "call_function"}


# --- Inductor itself ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_inductor_compiles_once_writes_in_place_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restores the variable after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiled: list[Program] = []
    before = children()

    def counted(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[Way, bytes]:
        compiled.append(program)
        return compile_program(program, tensors)

    monkeypatch.setattr(choice, "compile_program", counted)
    first = run_step(cpu_of(configured("inductor")))
    second = run_step(cpu_of(configured("inductor")))  # from the stored program
    assert len(compiled) == 1
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert any((tmp_path / "inductor").iterdir()), "kernels are not in hetpipe's cache"
    assert children() == before, "Inductor's pool of processes remains"


def children() -> set[str]:
    """Return the process ids of this process's children."""
    files = Path("/proc/self/task").glob("*/children")
    return {child for file in files for child in file.read_text().split()}
