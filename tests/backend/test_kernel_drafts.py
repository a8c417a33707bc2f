"""Drafts of specifications: inferred from a source, refused until filled in, then a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hetpipe.backends.opencl.user.outline import outline_of
from opencl_devices import IDS
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.sdk.formats.kernelspec import read_spec
from hetpipe.workbench.trial import check_sizes, outcomes, trial_of

POCL = next((each for each in IDS if "pocl" in each), None)

GELU = """\
__kernel void my_gelu(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    if (i < n)
        y[i] = 0.5f * x[i] * (1.0f + erf(x[i] * 0.70710678f));
}
"""
SEVERAL = """\
#define REAL float
typedef unsigned int u32;
/* a comment, with a comma */
__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void saxpy(global const REAL *restrict x /* input */, global REAL *y, float a, int n,
           local float *room)
{
    const int i = get_global_id(0);
    room[get_local_id(0)] = i < n ? x[i] : 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (i < n)
        y[i] = a * room[get_local_id(0)] + y[i];
}
__kernel void twice(__global const float4 *x, __global float4 *y) {
    y[get_global_id(0)] = 2.0f * x[get_global_id(0)];
}
__kernel void bits(__global const u32 *x, __global ushort *y, __global ulong *z) {
    const int i = get_global_id(0);
    *(y + i) = (ushort)x[i];
    z[i] = x[i] * 4294967296UL;
}
__kernel void group_sum(__global const float *x, __global float *sums) {
    __local float room[64];
    const int l = get_local_id(0);
    room[l] = x[get_global_id(0)];
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0;
    for (int i = 0; i < 64; i++) sum += room[i];
    sums[get_global_id(0)] = sum;
}
__kernel void halves(__global const half *x, __global half *y) {
    const int i = get_global_id(0);
    vstore_half(2.0f * vload_half(i, x), i, y);
}
__kernel void transpose(__global const float *x, __global float *y, int rows, int columns) {
    const int r = get_global_id(1), c = get_global_id(0);
    if (r < rows && c < columns) y[c * rows + r] = x[r * columns + c];
}
__kernel void picture(read_only image2d_t img, write_only image2d_t out) {
    int2 at = (int2)(get_global_id(0), get_global_id(1));
    write_imagef(out, at, 2.0f * read_imagef(img, at));
}
"""
MACRO = (
    "__kernel void f(__global const T *x, __global T *y) { int i = get_global_id(0); y[i] = x[i]; }"
)
FILLED: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "my_gelu": (GELU, (("y", "0.5 * x * (1 + erf(x * 0.7071067811865476))"),)),
    "saxpy": (SEVERAL, (("y", "a * x + y"),)),
    "twice": (SEVERAL, (("y", "2 * x"),)),
    "bits": (SEVERAL, (("y", "x"), ("z", "x.astype(uint64) * uint64(4294967296)"))),
    "group_sum": (SEVERAL, (("sums", "repeat(x.reshape(groups, 64).sum(1), 64)"),)),
    "halves": (SEVERAL, (("y", "2 * x"),)),
    "f": (MACRO, (("options", "-DT=float"), ("dtype", "float32"), ("y", "x"))),
    "transpose": (
        SEVERAL,
        (
            ("global_size", "columns, rows"), ("shape", "rows * columns"),
            ("y", "x.reshape(rows, columns).T.ravel()"),
        ),
    ),
    "picture": (SEVERAL, (("global_size", "n, n"), ("shape", "n, n"), ("out", "2 * img"))),
}  # fmt: skip


def drafted(folder: Path, source: str, function: str) -> Path:
    """Write a source and a draft for one of its kernels; return the draft's path."""
    path = folder / "mine.cl"
    path.write_text(source)
    CliRunner().invoke(
        app, ["kernels", "test", str(path), "--init", "--function", function],
        catch_exceptions=False,
    )  # fmt: skip
    return path.with_suffix(".toml")


def fill(draft: Path, key: str, values: str) -> None:
    """Replace the text FILL IN in the lines of a key, by one value after the other."""
    lines = draft.read_text().split("\n")
    for at, line in enumerate(lines):
        if line.startswith(f"{key} = "):
            for value in values.split(", ") if line.count("FILL IN") > 1 else [values]:
                line = line.replace("-DT=FILL IN", value, 1).replace("FILL IN", value, 1)
            lines[at] = line
    draft.write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.skipif(POCL is None, reason="PoCL is not installed")
@pytest.mark.parametrize("function", FILLED)
def test_a_draft_is_refused_until_it_is_filled_in(tmp_path: Path, function: str) -> None:
    source, values = FILLED[function]
    draft = drafted(tmp_path, source, function)
    for key, text in values:
        left = [n for n, line in enumerate(draft.read_text().split("\n"), 1) if '"FILL' in line]
        with pytest.raises(BackendError, match="is a draft; replace 'FILL IN' in these") as error:
            trial_of(tmp_path / "mine.cl", draft)
        assert all(f"{draft}:{number}: " in str(error.value) for number in left)
        fill(draft, key, text)
    trial = trial_of(tmp_path / "mine.cl", draft)
    check_sizes(trial)
    assert POCL is not None
    results = list(outcomes(trial, [POCL]))
    assert [each.flaws for each in results] == [()] * 3


def test_the_draft_of_the_example(tmp_path: Path) -> None:
    draft = drafted(tmp_path, GELU, "my_gelu")
    fill(draft, "y", "x")
    spec = read_spec(draft)
    assert (str(spec.global_size[0]), str(spec.local_size[0])) == ("round_up(n, 64)", "64")
    assert spec.inputs == ("x",)
    assert spec.outputs == ("y",)
    assert spec.cases == ({"n": 1}, {"n": 37}, {"n": 1000})


@pytest.mark.parametrize(
    ("body", "uses"),
    [
        ("y[0] = 1;", "written"),
        ("y[i[0]].x = 1;", "written"),
        ("y[0] += 1;", "read written"),
        ("y[0]++;", "read written"),
        ("--y[0];", "read written"),
        ("float a = y[0] == 1;", "read"),
        ("*y = 1;", "written"),
        ("*(y + 3) = 1;", "written"),
        ("float a = 2 + *y;", "read"),
        ("atomic_add(&y[0], 1);", "read written"),
        ("atomic_add(z, y[0]);", "read"),
        ("vstore4(v, y[2], z);", "read"),
        ("vstore4((float4)(1, 2, 3, 4), 0, &y[2]);", "written"),
        ("float4 v = vload4(0, y + 2);", "read"),
        ("event_t e = async_work_group_copy(y, z, 4, 0);", "written"),
        ("event_t e = async_work_group_copy(z, y, 4, 0);", "read"),
        ("helper(y, 1);", "passed"),
        ("__global float *q = y + 1;", "passed"),
        ("// y[0] = 1;", "passed"),
    ],
)
def test_the_use_of_a_parameter(body: str, uses: str) -> None:
    source = f"__kernel void f(__global float *y, __global float *z) {{ {body}\n }}"
    parameter = outline_of(source, "f", ()).parameters[0]
    assert " ".join(sorted(parameter.uses)) == uses


def outcome(folder: Path, *arguments: str) -> str:
    """Return the error of `hetpipe kernels test mine.cl` with these options."""
    path = str(folder / "mine.cl")
    result: Any = CliRunner().invoke(app, ["kernels", "test", path, *arguments])
    assert isinstance(result.exception, HetpipeError), result.output
    return str(result.exception)


def test_a_missing_specification_is_described(tmp_path: Path) -> None:
    (tmp_path / "mine.cl").write_text(SEVERAL)
    message = outcome(tmp_path)
    assert "mine.toml is missing: the specification" in message
    for line in (
        "kernel saxpy", "global const float *x  (read)", "global float *y  (read, written)",
        "local float *room", "read_only image2d_t img  (read)", "\n    int n\n",
        "mine.cl --function NAME --init",
    ):  # fmt: skip
        assert line in message


def test_what_no_draft_can_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.cl"
    path.write_text(SEVERAL)
    assert "mine.cl has 7 kernels: name one with --function NAME (saxpy" in outcome(
        tmp_path, "--init"
    )
    message = outcome(tmp_path, "--init", "--function", "twic")
    assert "no kernel 'twic'; did you mean twice?" in message
    for parameters, reason in {
        "__global float *y, float4 a": "a: it is a float4 by value",
        "__global float *y, sampler_t s": "s: it is a sampler_t",
        "__global float *y, __global float3 *x": "x: a float3 takes the room of four elements",
        "__global const float *x": "f has no parameter that it may write",
        "": "f has no parameter that it may write",
        "void": "f has no parameter that it may write",
    }.items():
        path.write_text(f"__kernel void f({parameters}) {{ }}")
        assert reason in outcome(tmp_path, "--init")
    assert not path.with_suffix(".toml").exists()


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    draft = drafted(tmp_path, GELU, "my_gelu")
    draft.write_text("mine")
    assert "exists already, and --init overwrites no file" in outcome(tmp_path, "--init")
    assert draft.read_text() == "mine"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[argument.n]", "[argument.m]", "has no parameter m; known: x, y, n"),
        ("[argument.x]", "[argument.xs]", "has no parameter xs; did you mean x?"),
        ('[argument.n]  # int n\nvalue = "n"\n', "", "lacks [argument.n] for the parameter int n"),
        ('[expect]  # ', "[tolerance]  # ", "needs a table [expect] with an expression for y"),
        ("[[case]]", "[[cases]]", "case"),
    ],
)  # fmt: skip
def test_what_a_specification_lacks_is_named(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    draft = drafted(tmp_path, GELU, "my_gelu")
    fill(draft, "y", "x")
    text = draft.read_text()
    assert old in text
    text = text.replace(old, new)
    draft.write_text(text.replace('y = "x"', "") if "[tolerance]" in new else text)
    assert reason in outcome(tmp_path)
