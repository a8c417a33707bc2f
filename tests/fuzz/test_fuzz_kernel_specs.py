"""Specifications of kernels: errors name file and line, and one that is read makes a case."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from damage import changed, spoilt
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import toml

from hetpipe.errors import BackendError
from hetpipe.sdk.formats.kernelspec import Size, read_spec
from hetpipe.workbench.case import call_of

PAGE = Path(__file__).parents[2] / "docs" / "testing-kernels.md"
(EXAMPLE, _) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SIZES = st.sampled_from(
    ["n", "m", 0, 1, 64, -3, "n * m", "round_up(n, 64)", "n // m", "9" * 50, "(" * 80, "n +", True]
) | st.text(max_size=12)
SHAPES = st.lists(SIZES, max_size=3)
PLAIN: dict[str, st.SearchStrategy[object]] = {
    "shape": SHAPES,
    "value": SIZES,
    "number": st.floats() | st.integers(),
    "local": SIZES,
    "dtype": st.sampled_from(["float32", "int64", "bool", "float16", "float8"]),
    "values": st.sampled_from(["normal", "integers", "arange", "zeros", "none"]),
    "low": st.floats(-1e40, 1e40),
    "high": st.floats(-1e40, 1e40),
    "output": st.booleans(),
}
ARGUMENTS = st.fixed_dictionaries({}, optional={**PLAIN, "scale": st.floats(-1.0, 1e40)})
SPECS = st.fixed_dictionaries(
    {
        "global_size": st.lists(SIZES, max_size=4),
        "argument": st.dictionaries(st.sampled_from("xyzn"), ARGUMENTS, max_size=3),
        "expect": st.dictionaries(st.sampled_from("xyz"), st.text(max_size=9), max_size=2),
        "case": st.lists(
            st.dictionaries(st.sampled_from("nm"), st.integers(-2, 2**33) | st.just(8)), max_size=2
        ),
    },
    optional={
        "local_size": SHAPES,
        "time_limit_s": st.floats(),
        "reference": st.text(max_size=9),
        "fixed": st.lists(st.sampled_from(["n", "m", "k"]), max_size=2),
        "define": st.dictionaries(
            st.sampled_from(["TILE", "n", "1 2"]), st.lists(st.integers(-1, 9), max_size=3)
        ),
        "beside": st.dictionaries(
            st.sampled_from("fg"), st.fixed_dictionaries({"global_size": SHAPES}), max_size=1
        ),
    },
)
RIGHT = st.fixed_dictionaries(
    {
        "global_size": st.just(["n"]),
        "argument": st.fixed_dictionaries(
            {"y": st.fixed_dictionaries({"shape": SHAPES.map(lambda s: [*s, "n"][:3]),
                                         "output": st.just(True)}),
             "x": st.fixed_dictionaries({}, optional=PLAIN)}
        ),
        "expect": st.just({"y": "1.0"}),
        "case": st.just([{"n": 8, "m": 3}]),
    }
)  # fmt: skip


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    spec = result_of(lambda: read_spec(path), (BackendError,))
    if isinstance(spec, str):
        assert re.match(r":\d*:? ?", spec.removeprefix(str(path))), spec
        return REFUSED
    call = result_of(lambda: call_of(spec, 0, path, "", "f", 0, 0), (BackendError,))
    if not isinstance(call, str):
        assert {name for name, each in call.arguments.items() if isinstance(each, np.ndarray)} == {
            *call.inputs,
            *call.outputs,
        }
    return ACCEPTED


def test_damaged(tmp_path: Path) -> None:
    files = spoilt(st.just(EXAMPLE.encode()))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "k.toml", content)))


def test_invented(tmp_path: Path) -> None:
    files = (SPECS | RIGHT | changed(RIGHT)).map(toml)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "k.toml", content)))


def test_sizes() -> None:
    def tried(text: str) -> str:
        made = result_of(lambda: Size(text).value({"n": 8, "m": 0}), (BackendError,))
        return REFUSED if isinstance(made, str) else ACCEPTED

    words = ["n", "m", "7", "0", "99999999999", "+", "-", "*", "//", "%", "(", ")", "min(", "n,"]
    texts = st.lists(st.sampled_from(words), max_size=9).map(" ".join) | st.text(max_size=250)
    check_both_ends(outcomes(texts, tried))
