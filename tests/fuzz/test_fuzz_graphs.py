"""Serialised graphs: Python's reader and the C reader, under sanitizers, agree on every case."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import TEXTS
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hetpipe.backends.native import include_folder
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite
from models import CASES

from hetpipe.capture import capture
from hetpipe.errors import BackendError
from hetpipe.optim import adam
from hetpipe.sdk.formats.serialised import serialise
from hetpipe.sdk.formats.serialised_reader import deserialise
from hetpipe.sdk.graph import core_decompositions

BY_PYTHON = (
    r"no operator|has no argument|has the name|has the operator getitem|arguments; it takes|"
    r"not in UTF-8"
)
"""Damage that C cannot detect: it knows no operators and accepts any bytes as a name."""


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], str]]:
    """Yield a function that asks the C reader, which runs for all cases."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler here: install gcc")
    judge = tmp_path_factory.mktemp("judge") / "judge"
    sources = [Path(__file__).with_name("graph_judge.c"), include_folder() / "hetpipe_graph.c"]
    flags = ["-std=c99", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags += ["-DHETPIPE_GRAPH_CHUNK=0", f"-I{include_folder()}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(judge)], check=True)
    with subprocess.Popen([judge], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pipe, answers = process.stdin, process.stdout
        assert pipe is not None
        assert answers is not None

        def ask(data: bytes) -> str:
            pipe.write(struct.pack("<I", len(data)) + data)
            pipe.flush()
            answer = answers.readline().decode("utf-8", "replace").strip()
            assert answer, "the reader in C has died: what it said stands above"
            return answer

        yield ask
        pipe.close()
        assert process.wait(60) == 0


def graphs() -> list[bytes]:
    """Return forward, backward and update of small models."""
    data = []
    for name in sorted(CASES)[:6]:
        case = CASES[name]
        torch.manual_seed(0)
        captured = capture(case.model(), case.loss_fn, case.batch(torch.Generator().manual_seed(0)))
        table = core_decompositions()
        (stage,) = captured.stage_graphs([], [table], [case.mini_batch], adam(lr=1e-3))
        passes = stage.passes[case.mini_batch]
        data += [serialise(p.graph) for p in (passes.forward, passes.backward, stage.update) if p]
    return data


def attempt(data: bytes, in_c: Callable[[bytes], str]) -> str:
    graph, answer = result_of(lambda: deserialise(data), (BackendError,)), in_c(data)
    if isinstance(graph, str):
        assert answer != "taken" or re.search(BY_PYTHON, graph), graph
        return REFUSED
    assert answer == "taken"
    again = serialise(graph)
    assert serialise(deserialise(again)) == again
    return ACCEPTED


def with_checksum(data: bytes) -> bytes:
    """Return the data with a right length and checksum."""
    return data[:12] + struct.pack("<II", len(data), zlib.crc32(data[20:])) + data[20:]


@composite
def damaged(draw: DrawFn, contents: SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(contents))
    for _ in range(draw(st.integers(1, 3))):
        place, change = draw(st.integers(8, len(data) - 9)), draw(st.integers(0, 5))
        if change == 0:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif change == 1:
            data[place] = draw(st.integers(0, 255))
        elif change == 2:
            number = draw(st.sampled_from([0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1]))
            data[place : place + 4] = struct.pack("<I", number)
        elif change == 3:
            number = draw(st.sampled_from([0, 1, -1, 2**31, 2**59, 2**60, 2**63 - 1, -(2**63)]))
            data[place : place + 8] = struct.pack("<q", number)
        elif change == 4:
            del data[place : place + draw(st.integers(1, 9))]
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 40))]
    return bytes(data)


@pytest.fixture(scope="module")
def captured() -> list[bytes]:
    return graphs()


def test_damaged(captured: list[bytes], in_c: Callable[[bytes], str]) -> None:
    files = damaged(st.sampled_from(captured))
    counts = outcomes(files, lambda data: attempt(data, in_c) if data not in captured else REFUSED)
    assert set(counts) == {REFUSED}


def test_damaged_under_a_right_checksum(
    captured: list[bytes], in_c: Callable[[bytes], str]
) -> None:
    files = damaged(st.sampled_from(captured)).map(with_checksum)
    check_both_ends(outcomes(files, lambda data: attempt(data, in_c)))


OPERATORS = ["aten.relu.default", "aten.mul.Scalar", "aten.mm.default", "aten.max.dim",
             "aten.sum.dim_IntList", "aten.view.default", "aten.cat.default", "aten.full.default",
             "aten.relu", "os.system.x", "aten.__class__.__init__", "getitem", "aten.mul.name",
             "prims.sin.default", "aten.relu.default.x", ""]  # fmt: skip
KEYWORDS = ["dim", "keepdim", "dtype", "self", "class", ""]
NODES = ["x", "y", "class", "def", "self", "torch", "None", "_", "x_1", "ñ", "x" * 5000, "a b", ""]
LARGE = st.sampled_from([-1, 2**31, 2**59, 2**60, 2**63 - 1, -(2**63)])


class Bytes:
    """Writes a graph field by field; now and then a field is wrong."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw, self.data, self.strings = draw, bytearray(), {"x": 0}

    def odd(self, one_in: int = 60) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    def put(self, code: str, value: Any) -> None:
        self.data += struct.pack("<" + code, value)

    def text(self, text: str) -> None:
        text = text.replace("\0", "0")
        number = self.strings.setdefault(text, len(self.strings))
        self.put("I", self.draw(st.sampled_from([999, 2**32 - 1])) if self.odd() else number)

    def count(self, count: int) -> None:
        wrong = st.sampled_from([count + 1, max(count - 1, 0), 2**31, 2**32 - 1])
        self.put("I", self.draw(wrong) if self.odd() else count)

    def form(self) -> None:
        if self.odd(20):
            self.data += b"\0\0"
            return
        size = LARGE if self.odd() else st.integers(0, 3)
        shape = self.draw(st.lists(size, max_size=3))
        shape *= 11 if self.odd() else 1
        self.put(
            "B", self.draw(st.integers(0, 255)) if self.odd() else self.draw(st.integers(1, 10))
        )
        self.put("B", len(shape))
        for size in shape:
            self.put("q", size)

    def value(self, number: int, depth: int = 0) -> None:
        kind = self.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]))
        self.put("B", 8 if self.odd() else kind)
        if kind == 1:
            self.put("B", 2 if self.odd() else self.draw(st.integers(0, 1)))
        elif kind == 2:
            self.put("q", self.draw(st.integers(-3, 3) | LARGE))
        elif kind == 3:
            self.put("d", self.draw(st.floats()))
        elif kind == 4:
            self.text(self.draw(TEXTS))
        elif kind == 5:
            self.put("B", self.draw(st.integers(0, 11)))
        elif kind == 6:
            self.node(number)
        elif kind == 7:
            levels = self.draw(st.sampled_from([0, 0, 0, 7, 8, 300]))
            self.data += (b"\7" + struct.pack("<I", 1)) * levels
            entries = self.draw(st.integers(0, 2)) if depth < 2 else 0
            self.count(entries)
            for _ in range(entries):
                self.value(number, depth + 1)

    def node(self, number: int) -> None:
        least = max(number - 1, 0)
        self.put("I", self.draw(st.sampled_from([0, number, 2**31])) if self.odd(20) else least)


@composite
def invented(draw: DrawFn) -> bytes:
    """Draw a sequence of nodes of all kinds; each reads the previous one."""
    out, nodes = Bytes(draw), draw(st.integers(1, 5))
    names = st.sampled_from(NODES)
    for number in range(nodes):
        last = number == nodes - 1
        kind = 4 if last else 1 if number == 0 else draw(st.sampled_from([1, 2, 2, 2, 3]))
        kind = draw(st.integers(0, 5)) if out.odd(40) else kind
        out.put("B", kind)
        out.text(draw(names) if out.odd(20) else "output" if last else f"n{number}")
        out.put("I", 2**32 - 1)
        if kind == 1:
            flags = (
                draw(st.integers(0, 255)) if out.odd(20) else draw(st.sampled_from([0, 1, 2, 7]))
            )
            out.put("B", flags)
            for _ in range((flags >> 1 & 1) * 2 + (flags >> 2 & 1)):
                out.put("q", draw(st.integers(-1, 9) | LARGE))
            out.form()
        elif kind == 2:
            out.text(draw(st.sampled_from(OPERATORS)))
            args, kwargs = draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 0, 1, 2]))
            out.count(args)
            for _ in range(args):
                out.value(number)
            out.count(kwargs)
            for _ in range(kwargs):
                out.text(draw(st.sampled_from(KEYWORDS)))
                out.value(number)
            several = draw(st.sampled_from([0, 0, 0, 1]))
            out.put("B", 2 if out.odd() else several)
            results = draw(st.integers(0, 3)) if several else 1
            if several:
                out.count(results)
            for _ in range(results):
                out.form()
        elif kind == 3:
            out.node(number)
            out.put("I", draw(st.integers(0, 2)))
            out.form()
        elif kind == 4:
            outputs = draw(st.integers(0, 2)) if number else 0
            out.count(outputs)
            for _ in range(outputs):
                out.node(number)
    table = b"".join(text.encode("utf-8", "surrogatepass") + b"\0" for text in out.strings)
    counts = struct.pack("<III", len(out.strings), len(table), nodes)
    return with_checksum(
        b"HETGRAPH" + struct.pack("<III", 1, 0, 0) + counts + table + bytes(out.data)
    )


def test_invented(in_c: Callable[[bytes], str]) -> None:
    check_both_ends(outcomes(invented(), lambda data: attempt(data, in_c)))


def test_noise(in_c: Callable[[bytes], str]) -> None:
    head = b"HETGRAPH" + struct.pack("<III", 1, 0, 0)
    files = st.binary(max_size=200) | st.binary(max_size=200).map(
        lambda end: with_checksum(head + end)
    )
    assert set(outcomes(files, lambda data: attempt(data, in_c))) == {REFUSED}
