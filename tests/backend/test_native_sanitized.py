"""The example under AddressSanitizer and UndefinedBehaviorSanitizer, run without Python."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from found_devices import trace
from native_libraries import built, compile_c, example
from torch import fx

from hetpipe.capture import capture
from hetpipe.optim import adam
from hetpipe.sdk.formats.serialised import serialise
from hetpipe.sdk.graph import core_decompositions

CASES = 3000
CYCLES = 300


def cnn_graphs() -> list[fx.GraphModule]:
    """Return forward, backward and update of a small network with most operators of the example."""
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2, 2, 1), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3),
    )  # fmt: skip
    batch = (torch.randn(2, 1, 4, 4), torch.tensor([0, 2]))
    captured = capture(model, nn.functional.cross_entropy, batch)
    (stage,) = captured.stage_graphs([], [core_decompositions()], [2], adam(lr=1e-3))
    passes = stage.passes[2]
    return [program.graph for program in (passes.forward, passes.backward, stage.update) if program]


@pytest.fixture(scope="module")
def serialised() -> list[bytes]:
    return [serialise(graph) for graph in cnn_graphs()]


def replay(*arguments: object, sanitized: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the driver; any report of a sanitizer changes its exit status."""
    driver = built("sanitized") / "replay-sanitized" if sanitized else built("replay") / "replay"
    return subprocess.run(
        [str(driver), *map(str, arguments)], capture_output=True, text=True, timeout=250
    )


def library() -> Path:
    return built("sanitized") / "libexample-sanitized.so"


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def damaged(data: bytes, generator: random.Random) -> bytes:
    """Change some numbers and sometimes cut off the end; mostly with a right checksum."""
    damaged = bytearray(data)
    for _ in range(generator.randint(1, 3)):
        width = generator.choice([1, 1, 4, 8])
        place = generator.randrange(8, len(damaged) - width)
        value = generator.choice([0, 1, 2, 255, generator.randrange(256)])
        damaged[place : place + width] = bytes([value] * width)
    if generator.random() < 0.1:
        del damaged[generator.randrange(32, len(damaged)) :]
    if generator.random() < 0.9:
        damaged[12:20] = struct.pack("<II", len(damaged), zlib.crc32(damaged[20:]))
    return bytes(damaged)


@pytest.mark.slow
def test_programs_run_and_leak_nothing(serialised: list[bytes], tmp_path: Path) -> None:
    for number, data in enumerate(serialised):
        path = tmp_path / str(number)
        path.write_bytes(data)
        output_of(replay(library(), path))


@pytest.mark.slow
def test_results_equal_torch(tmp_path: Path) -> None:
    x, w = (torch.randn(3, 3, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    graph = trace(lambda x, w: ((x @ w).tanh(), x.sum(0)), [x, w], core_decompositions())
    for name, array in (("graph", serialise(graph)), ("x", x.numpy()), ("w", w.numpy())):
        (tmp_path / name).write_bytes(bytes(array))
    output_of(replay(library(), *(tmp_path / name for name in ("graph", "x", "w"))))
    for number, expected in enumerate(((x @ w).tanh(), x.sum(0))):
        array = np.fromfile(tmp_path / f"graph.{number}", np.float32).reshape(expected.shape)
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_damaged_graphs_are_refused_or_run(serialised: list[bytes], tmp_path: Path) -> None:
    generator = random.Random(0)
    cases = [damaged(generator.choice(serialised), generator) for _ in range(CASES)]
    cases += [generator.randbytes(generator.randrange(100)) for _ in range(100)]
    cases += [serialised[0][:end] for end in range(0, len(serialised[0]), 40)]
    cases += serialised
    path = tmp_path / "cases"
    path.write_bytes(b"".join(struct.pack("<I", len(case)) + case for case in cases))
    said = output_of(replay("--fuzz", library(), path))
    counts = list(map(int, re.findall(r"\d+", said)))
    assert counts[0] == len(cases), said
    assert min(counts) >= len(serialised), said  # some of every kind


def test_load_open_run_close_again_and_again(serialised: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(serialised[0])
    arguments = ("--cycles", CYCLES, example(), tmp_path / "graph")
    said = output_of(replay(*arguments, sanitized=False))
    grown = re.search(r"grown by (-?\d+) KiB", said)
    assert grown is not None
    assert int(grown[1]) < CYCLES, said  # allocators settle; a page per cycle would be 4 times that
    output_of(replay("--cycles", 20, library(), tmp_path / "graph"))


@pytest.mark.parametrize(
    ("fault", "report"),
    [("FREED", "heap-use-after-free"), ("LEAK", "LeakSanitizer"), ("FAR", "heap-buffer-overflow"),
     ("OVERFLOW", "signed integer overflow")],
)  # fmt: skip
def test_the_sanitizers_see_faults(tmp_path: Path, fault: str, report: str) -> None:
    """Otherwise the tests above could not fail."""
    source = tmp_path / "fault.c"
    source.write_text(
        "#include <limits.h>\n#include <stdlib.h>\nint main(int n, char **v) {\n"
        "char *p = malloc(8); (void)v; p[0] = (char)n;\n"
        "#if defined FREED\nfree(p); n = p[0];\n"
        "#elif defined LEAK\np = NULL;\n"
        "#elif defined FAR\nn = p[8]; free(p);\n"
        "#else\nfree(p); n += INT_MAX;\n#endif\n"
        "return n == 12345;\n}\n"
    )
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-D{fault}", "-w"]
    compile_c(*flags, str(source), "-o", str(tmp_path / "fault"))
    done = subprocess.run([str(tmp_path / "fault")], capture_output=True, text=True)
    assert done.returncode != 0
    assert report in done.stderr
