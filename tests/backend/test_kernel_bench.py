"""The test bench for users' kernels: right kernels pass, and a fault is named with its line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from opencl_devices import IDS
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.conformance.check import Level
from hetpipe.conformance.run import checks_of, run_suite
from hetpipe.errors import BackendError
from hetpipe.sdk.formats.kernelspec import Size, Tolerance, read_spec
from hetpipe.sdk.host.registry import devices_of
from hetpipe.sdk.kernels import Flaw
from hetpipe.workbench.child import output_error
from hetpipe.workbench.trial import Outcome, check_sizes, outcomes, trial_of

CHECKER = next((each for each in IDS if "oclgrind" in each), None)
RUNTIME = next((each for each in IDS if "pocl" in each or "intel-cpu" in each), None)
needs_checker = pytest.mark.skipif(CHECKER is None, reason="Oclgrind is not installed")
needs_runtime = pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")

FAULTY = """\
__kernel void race(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    y[i / 2] = x[i];
}
__kernel void bounds(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    y[i] = x[i] + x[i + 1];
}
__kernel void stale(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    y[i] += x[i];
}
__kernel void wrong(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    const float exact = x[i];
    y[i] = i == 5 ? exact * 1.0001f : exact;
}
__kernel void beyond(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    y[i] = x[i];
    if (i == 0) y[n] = 1.0f;
}
__kernel void half_done(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    if (i != 7) y[i] = x[i];
}
__kernel void endless(__global const float *x, __global volatile float *y, const int n)
{
    while (n > 0) y[0] = x[0];
}
__kernel void crashing(__global const float *x, __global float *y, const int n)
{
    y[get_global_id(0) + (1 << 29)] = x[0];
}
"""
SPEC = """\
global_size = ["n"]
time_limit_s = 4.0
[argument.x]
shape = ["n"]
[argument.y]
shape = ["n"]
output = true
[argument.n]
value = "n"
[expect]
y = "x"
[[case]]
n = 64
"""
SAXPY = """\
kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void saxpy(global const float *x, global float *y, float a, int n, local float *room)
{
    const int i = get_global_id(0);
    room[get_local_id(0)] = i < n ? x[i] : 0.0f;  /* y[0] = 1 is no store */
    barrier(CLK_LOCAL_MEM_FENCE);
    if (i < n)
        y[i] = a * room[get_local_id(0)] + y[i];
}
"""
SAXPY_SPEC = """\
global_size = ["round_up(n, 16)"]
local_size = [16]
[argument.x]
shape = ["n"]
values = "uniform"
low = -8.0
high = 8.0
[argument.y]
shape = ["n"]
values = "normal"
output = true
[argument.a]
number = 1.5
[argument.n]
value = "n"
[argument.room]
local = 16
[expect]
y = "a * x + y"
[tolerance.y]
error = "ulp"
units = 2
[[case]]
n = 1
[[case]]
n = 0
[[case]]
n = 100
"""


@pytest.fixture
def run_kernel(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Return a function that runs a kernel on a device."""

    def run(device_id: str, source: str, spec: str, function: str = "") -> list[Outcome]:
        path = tmp_path / "mine.cl"
        path.write_text(source)
        path.with_suffix(".toml").write_text(spec)
        trial = trial_of(path, path.with_suffix(".toml"), function)
        check_sizes(trial)
        return list(outcomes(trial, [device_id]))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("device_id", IDS)
def test_a_right_kernel_passes_everywhere(
    device_id: str, run_kernel: Callable[..., list[Outcome]]
) -> None:
    results = run_kernel(device_id, SAXPY, SAXPY_SPEC)
    assert [each.case for each in results] == [0, 1, 2]
    assert [each.flaws for each in results] == [(), (), ()]
    assert all(0 <= each.ulp["y"] <= 2 for each in results)


VECTORS = """\
kernel void twice(global const float4 *x, global float4 *y) {
    y[get_global_id(0)] = 2.0f * x[get_global_id(0)];
}
"""
VECTORS_SPEC = """\
global_size = ["n // 4"]
fixed = ["n"]
[argument.x]
shape = ["n"]
[argument.y]
shape = ["n"]
output = true
[expect]
y = "2.0 * x"
[[case]]
n = SIZE
"""


@pytest.mark.slow
def test_parameters_may_be_vectors(run_kernel: Callable[..., list[Outcome]]) -> None:
    """The tensors are declared as whole vectors; the expected values count elements."""
    results = run_kernel(IDS[0], VECTORS, VECTORS_SPEC.replace("SIZE", "64"))
    assert results
    assert all(each.flaws == () and each.ulp["y"] == 0 for each in results)
    wrong = run_kernel(IDS[0], VECTORS, VECTORS_SPEC.replace("SIZE", "66"))[0]
    assert "wrong arguments" in [flaw.kind for flaw in wrong.flaws]
    assert "the source declares float4 *x" in wrong.flaws[0].text


@needs_checker
@pytest.mark.parametrize(
    ("function", "kind", "line"),
    [("race", "race", 4), ("bounds", "out of bounds", 9), ("stale", "uninitialised read", 14)],
)
def test_the_checker_names_kind_and_line(
    run_kernel: Callable[..., list[Outcome]], function: str, kind: str, line: int
) -> None:
    (result,) = run_kernel(CHECKER, FAULTY, SPEC, function)
    assert (kind, function, line) in [(f.kind, f.kernel, f.line) for f in result.flaws]


@pytest.mark.slow
@needs_runtime
@pytest.mark.parametrize(
    ("function", "kinds", "line"),
    [
        ("wrong", ["wrong result"], 20),
        ("beyond", ["out of bounds"], None),
        ("half_done", ["not written"], None),
        ("stale", ["not deterministic", "wrong result"], None),
        ("bounds", ["wrong result"], 9),  # memory beyond the end is NaN
        ("endless", ["hangs"], None),
        ("crashing", ["crashes"], None),
    ],
)
def test_a_runtime_finds_some_faults(
    run_kernel: Callable[..., list[Outcome]], function: str, kinds: list[str], line: int | None
) -> None:
    spec = SPEC if function == "endless" else SPEC.replace("= 4.0", "= 60.0")
    (result,) = run_kernel(RUNTIME, FAULTY, spec, function)
    assert [flaw.kind for flaw in result.flaws] == kinds
    assert {flaw.kernel for flaw in result.flaws} == {function}
    if line is not None:
        assert result.flaws[0].line == line
    if function == "wrong":
        assert "element [5]" in result.flaws[0].text
        assert "1 of 64 elements" in result.flaws[0].text


@pytest.mark.slow
@needs_runtime
@pytest.mark.parametrize(
    ("source", "spec", "kind", "word"),
    [
        (SAXPY.replace("barrier", "barrer"), SAXPY_SPEC, "does not build", "barrer"),
        (SAXPY, SAXPY_SPEC.replace("number = 1.5", 'shape = ["n"]'), "wrong arguments", "float a"),
        (SAXPY, SAXPY_SPEC.replace("= [16]", "= [8]").replace("16)", "8)"), "wrong arguments", "8"),
    ],
    ids=["build", "type", "local size"],
)
def test_an_impossible_launch_is_a_flaw(
    run_kernel: Callable[..., list[Outcome]], source: str, spec: str, kind: str, word: str
) -> None:
    spec = spec.replace('y = "a * x + y"', 'y = "x"')
    result = run_kernel(RUNTIME, source, spec)[0]
    assert [flaw.kind for flaw in result.flaws] == [kind]
    assert word in result.flaws[0].text
    if kind == "does not build":
        assert result.flaws[0].line == 6


@pytest.mark.slow
@needs_runtime
def test_a_reference_in_python(tmp_path: Path, run_kernel: Callable[..., list[Outcome]]) -> None:
    (tmp_path / "reference.py").write_text("def same(x, n):\n    return x[:n] * 1.0\n")
    spec = SPEC.replace('[expect]\ny = "x"\n', "").replace("= 4.0", "= 60.0")
    spec = 'reference = "reference.py:same"\n' + spec
    right = FAULTY.replace("y[i / 2] = x[i]", "y[i] = x[i]")
    (result,) = run_kernel(RUNTIME, right, spec, "race")
    assert result.flaws == ()
    (tmp_path / "reference.py").write_text("def same(x, n):\n    return x / none\n")
    with pytest.raises(BackendError, match=r"same.*NameError"):
        run_kernel(RUNTIME, right, spec, "race")


@pytest.mark.slow
@needs_runtime
def test_the_fixture_fails_with_the_line_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.cl").write_text(FAULTY)
    (tmp_path / "mine.toml").write_text(SPEC.replace("= 4.0", "= 60.0"))
    (tmp_path / "test_mine.py").write_text(
        "def test_wrong(check_kernel):\n"
        f"    check_kernel('mine.cl', function='wrong', devices=['{RUNTIME}'])\n"
        "def test_right(check_kernel):\n"
        f"    check_kernel('good.cl', 'mine.toml', function='race', devices=['{RUNTIME}'])\n"
    )
    (tmp_path / "good.cl").write_text(FAULTY.replace("y[i / 2] = x[i]", "y[i] = x[i]"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout
    assert "mine.cl:20  wrong on" in done.stdout
    assert "hetpipe kernels test" in done.stdout


def kernel(body: str, head: str = "") -> str:
    """Return the source of a kernel f(x, y, n)."""
    return f"""{head}
__kernel void f(__global float *x, __global float *y, const int n)
{{
    const int i = get_global_id(0);
    {body}
}}
"""


def spec_for(expect: str, *changes: tuple[str, str]) -> str:
    text = SPEC.replace('y = "x"', f"y = {expect!r}").replace("= 4.0", "= 20.0")
    for change in changes:
        assert change[0] in text
        text = text.replace(*change, 1)
    return text


def place(flaw: Flaw) -> tuple[str, str, int | None]:
    """Return a flaw's kind, kernel and line."""
    return flaw.kind, flaw.kernel, flaw.line


@pytest.mark.slow
@needs_checker
def test_each_finding_of_the_checker_belongs_to_its_case(tmp_path: Path) -> None:
    (tmp_path / "f.cl").write_text(kernel("y[n > 50 ? i / 2 : i] = n > 50 ? x[i] : 3.0f * x[i];"))
    spec = spec_for("x", ("n = 64", "n = 8\n[[case]]\nn = 64\n[[case]]\nn = 0"))
    (tmp_path / "f.toml").write_text(spec.replace("time", 'fixed = ["n"]\ntime'))
    trial = trial_of(tmp_path / "f.cl", tmp_path / "f.toml")
    assert CHECKER is not None
    results = list(outcomes(trial, [CHECKER]))
    kinds = [{flaw.kind for flaw in each.flaws} for each in results]
    assert kinds[0] == {"wrong result"}
    assert {"race", "wrong result"} <= kinds[1]
    assert kinds[2] == set()
    words = trial.again(CHECKER, 1).split()
    number, seed = (int(words[words.index(f"--{name}") + 1]) for name in ("case", "seed"))
    (again,) = outcomes(replace(trial, seed=seed), [CHECKER], [number])
    # Oclgrind's threads decide which of several racing work-items it names.
    assert [place(flaw) for flaw in again.flaws] == [place(flaw) for flaw in results[1].flaws]


CHEATS = {
    "overwrites": (
        "if (i < n) { y[i] = 2.0f * x[i]; x[i] = 0.0f; }", "2 * x", (),
        "overwrites an input", "64 of 64 elements", ("output = true", "output = true"),
    ),
    "constant": (
        "y[i] = 1.0f;", "x * x", (('shape = ["n"]', 'shape = ["n"]\nvalues = "ones"'),),
        "wrong result", "with other values", ("values", "scale = 1\nvalues"),
    ),
    "listed shapes": (
        "if (n == 64) y[i] = x[i]; else y[i] = 0.0f;", "x", (),
        "wrong result", "with n = 65", ("time", 'fixed = ["n"]\ntime'),
    ),
    "overflow": (
        "y[i] = log(1.0f + exp(x[i]));", "logaddexp(0, x)", (),
        "wrong result", "it should be", ('shape = ["n"]', 'shape = ["n"]\nscale = 2.0'),
    ),
}  # fmt: skip


@pytest.mark.slow
@needs_runtime
@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_right_only_for_the_listed_runs_is_found(
    run_kernel: Callable[..., list[Outcome]], name: str
) -> None:
    body, expect, changes, kind, words, declared = CHEATS[name]
    spec = spec_for(expect, *changes)
    (result,) = run_kernel(RUNTIME, kernel(body), spec)
    assert [flaw.kind for flaw in result.flaws] == [kind]
    assert words in result.flaws[0].text
    if name != "overwrites":  # a specification may declare that this is no fault
        (result,) = run_kernel(RUNTIME, kernel(body), spec.replace(*declared, 1))
        assert result.flaws == ()


@pytest.mark.slow
@needs_runtime
def test_an_expectation_may_use_all_of_python_but_should_vary(
    run_kernel: Callable[..., list[Outcome]],
) -> None:
    sums = spec_for("x.reshape(n, 1).sum(1) + array([0.0 * n for _ in x])")
    (result,) = run_kernel(RUNTIME, kernel("y[i] = x[i];"), sums)
    assert (result.flaws, result.notes) == ((), ())
    (result,) = run_kernel(RUNTIME, kernel("y[i] = 3.0f;"), spec_for("3 + 0 * x"))
    assert result.flaws == ()
    assert "y should be 3 in every element" in result.notes[0]


@pytest.mark.slow
@needs_runtime
def test_a_device_that_lacks_a_feature_is_skipped(
    run_kernel: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    lacking = [each for each in IDS if "pocl" in each or "oclgrind" in each]
    half = kernel("half h = (half)x[i]; y[i] = h;", "#pragma OPENCL EXTENSION cl_khr_fp16 : enable")
    for device_id in lacking:
        (result,) = run_kernel(device_id, half, spec_for("x"))
        assert result.flaws == ()
        assert "cl_khr_fp16" in result.skipped
    arguments = [word for each in lacking for word in ("--device", each)]
    done = CliRunner().invoke(app, ["kernels", "test", str(tmp_path / "mine.cl"), *arguments])
    assert "has run on no device" in str(done.exception)
    assert "skipped" in done.output
    stored = kernel("y[i] = vload_half(0, (const __global half *)x) * 0.0f + x[i];")
    (result,) = run_kernel(lacking[0], stored, spec_for("x", ("time", 'fixed = ["n"]\ntime')))
    assert not result.skipped  # every device reads halves from memory


@pytest.mark.slow
@needs_runtime
def test_a_grid_of_defined_values(run_kernel: Callable[..., list[Outcome]], tmp_path: Path) -> None:
    spec = spec_for(
        "x * TILE", ("n = 64", "n = 64\n[[case]]\nn = 5\n[define]\nTILE = [8, 16]"),
        ('["n"]', '["round_up(n, TILE)"]'), ("time", 'operator = "aten.relu.default"\ntime'),
        ('shape = ["n"]', 'shape = ["n"]\ninput = 0'), ("output", "result = 0\noutput"),
    )  # fmt: skip
    results = run_kernel(RUNTIME, kernel("if (i < n) y[i] = x[i] * (TILE == 16 ? 2 : TILE);"), spec)
    assert [dict(each.sizes) for each in results] == [
        {"n": 64, "TILE": 8}, {"n": 5, "TILE": 8}, {"n": 64, "TILE": 16}, {"n": 5, "TILE": 16}
    ]  # fmt: skip
    assert [bool(each.flaws) for each in results] == [False, False, True, True]
    from hetpipe.backends.opencl.user.specification import kernel_of

    assert kernel_of(tmp_path / "mine.toml").options == ("-DTILE=8",)


PAIR = """#pragma OPENCL EXTENSION cl_intel_channels : enable
channel float link __attribute__((depth(4)));
__kernel void feed(__global const float *x, const int n)
{
    for (int i = 0; i < n; i++) write_channel_intel(link, x[i]);
}
__kernel void drain(__global float *y, const int n)
{
    for (int i = 0; i < n; i++) y[i] = 2.0f * read_channel_intel(link);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("device_id", [each for each in IDS if "fpga" in each or each == RUNTIME])
def test_kernels_joined_by_a_channel(
    run_kernel: Callable[..., list[Outcome]], device_id: str
) -> None:
    spec = spec_for(
        "2 * x", ("n = 64", "n = 64\n[beside.feed]\nglobal_size = [1]"), ('["n"]', "[1]")
    )
    (result,) = run_kernel(device_id, PAIR, spec)
    assert result.flaws == ()
    assert ("cl_intel_channels" in result.skipped) == ("fpga" not in device_id)


IMAGES = """__kernel void turn(read_only image2d_t x, write_only image2d_t y)
{
    const sampler_t nearest = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
    const int2 at = (int2)(get_global_id(0), get_global_id(1));
    write_imagef(y, at, read_imagef(x, nearest, (int2)(at.y, at.x)));
}
"""
IMAGES_SPEC = """global_size = ["w", "h"]
[argument.x]
shape = ["w", "h", 4]
[argument.y]
shape = ["h", "w", 4]
output = true
[expect]
y = "x.transpose(1, 0, 2)"
[[case]]
w = 5
h = 3
"""


@pytest.mark.slow
@pytest.mark.parametrize("device_id", IDS)
def test_images(run_kernel: Callable[..., list[Outcome]], device_id: str) -> None:
    (result,) = run_kernel(device_id, IMAGES, IMAGES_SPEC)
    assert result.flaws == ()
    assert ("no images" in result.skipped) == ("fpga" in device_id)
    if device_id == RUNTIME:
        (result,) = run_kernel(device_id, IMAGES, IMAGES_SPEC.replace(", 4]", ", 3]"))
        assert "1, 2 or 4 channels" in result.flaws[0].text


@pytest.mark.slow
@needs_runtime
def test_a_large_error_within_the_tolerance_is_explained(tmp_path: Path) -> None:
    (tmp_path / "f.cl").write_text(kernel("y[i] = (x[i] + 1000.0f) - 1001.0f;"))
    spec = spec_for("x - 1", ("[[case]]", "[tolerance.y]\nterms = 10000\n[[case]]"))
    (tmp_path / "f.toml").write_text(spec)
    assert RUNTIME is not None
    done = CliRunner().invoke(app, ["kernels", "test", f"{tmp_path}/f.cl", "--device", RUNTIME])
    assert done.exit_code == 0, done.output
    assert "units of its last place. This is no fault" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("time", 'fixed = ["k"]\ntime'), "fixed has k, which no case has"),
        (("[expect]", "[define]\nn = [1]\n[expect]"), "define has n, which is a size of a case"),
        (("[expect]", "[define]\nT = []\n[expect]"), "define.T"),
        (("output = true", "output = true\nscale = 2.0"), "scale is for the values of an input"),
        (
            ("[expect]", "[beside.none]\nglobal_size = [1]\n[expect]"),
            "`beside` names none; it may name",
        ),
        (("[argument.n]", "[argument.n]\nshape = [3]"), "2 of shape, value, number and local"),
        (('y = "x"', 'z = "x"'), "expect has z"),
        (("n = 64", "n = -1"), "case.0.n is -1"),
        (('["n"]\ntime', '["n +"]\ntime'), "is no size"),
        (('["n"]\ntime', '["m"]\ntime'), "no size 'm'"),
        (("output = true", ""), "no argument is an output"),
        (("time_limit_s = 4.0", "speed = 1"), "unknown key 'speed'"),
        (('["n"]\ntime', '["n"]\nlocal_size = [48]\ntime'), "no multiple of the local size 48"),
        (("n = 64", "n = 2000000000"), "elements"),
        (("time_limit_s = 4.0", "reference = 'a.py:b'"), "not both"),
    ],
)
def test_a_specification_is_refused_with_its_place(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    (tmp_path / "mine.cl").write_text(FAULTY)
    path = tmp_path / "mine.toml"
    path.write_text(SPEC.replace(*change, 1))
    with pytest.raises(BackendError, match=message):
        check_sizes(trial_of(tmp_path / "mine.cl", path, "wrong"))


def test_a_file_with_several_kernels_needs_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine.cl").write_text(FAULTY)
    (tmp_path / "mine.toml").write_text(SPEC)
    with pytest.raises(BackendError, match=r"8 kernels; write function.*kernels: race, bounds"):
        trial_of(tmp_path / "mine.cl", tmp_path / "mine.toml")
    with pytest.raises(BackendError, match=r"no backend runs kernels of .*mine\.cu"):
        trial_of(tmp_path / "mine.cu", tmp_path / "mine.toml")


def test_sizes_are_whole_numbers() -> None:
    sizes = {"n": 100, "m": 7}
    for text, value in {
        "n": 100, "ceil_div(n, 64)": 2, "round_up(n, 64) * 2": 256, "n // m % 5": 4,
        "max(n, m, 3) - min(n, m)": 93, "12": 12,
    }.items():  # fmt: skip
        assert Size(text).value(sizes) == value
    for text in ("n.bit_length()", "__import__('os')", "n if m else 1", "2 ** 99", "f(n)", "1.5"):
        with pytest.raises(BackendError, match="is no size"):
            Size(text)
    for text, why in {"m - n": "is -93", "n // (m - 7)": "divides by 0"}.items():
        with pytest.raises(BackendError, match=why):
            Size(text).value(sizes)


def test_error_classes() -> None:
    right = np.array([1.0, 2.0, np.inf, np.nan])
    near = right.astype(np.float32)
    near[0] = np.nextafter(np.float32(1.0), np.float32(2.0))
    ulp = Tolerance("ulp", 1.0)
    assert output_error(near, right, ulp, 1).wrong == 0
    assert output_error(near, right, ulp, 1).ulp == 1
    assert output_error(near, right, Tolerance("exact"), 1).wrong == 1
    assert output_error(near, right, Tolerance("sum"), 1).wrong == 0
    assert 0 < output_error(near, right, Tolerance("sum"), 1).share < 0.1
    beyond = np.array([1e200, 1.0])  # a value beyond float32 does not widen the class
    assert output_error(np.array([np.inf, 1.1], np.float32), beyond, Tolerance("sum"), 1).wrong == 1
    for bad in (np.array([1, 2, -np.inf, np.nan]), np.array([1, 2, np.inf, 0.0])):
        for tolerance in (ulp, Tolerance("sum"), Tolerance("exact")):
            assert output_error(bad.astype(np.float32), right, tolerance, 1).wrong == 1
    large = np.array([1000.0, 0.0])
    off = np.array([1000.0, 1e-3], np.float32)
    assert output_error(off, large, Tolerance("sum"), 1).wrong == 0  # 16 eps of 1000 is 1.9e-3
    assert output_error(off, large, ulp, 1).wrong == 1


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be read"):
        read_spec(tmp_path / "none.toml")


def test_without_a_file_a_backends_operators_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the checks that find a wrong kernel run, and only on the named device."""
    seen: list[tuple[list[str], tuple[str, ...]]] = []
    monkeypatch.setattr(
        "hetpipe.cli.conform.conform",
        lambda infos, level, groups, *_, **__: seen.append(([i.id for i in infos], groups)),
    )
    if RUNTIME is None:
        pytest.skip("no OpenCL runtime for CPUs")
    done = CliRunner().invoke(app, ["kernels", "test", "--device", RUNTIME])
    assert done.exit_code == 0, done.output
    assert seen == [([RUNTIME], ("operators", "lengths", "strides", "dtypes", "values"))]
    done = CliRunner().invoke(app, ["kernels", "test", "--device", "opencl:none:0"])
    assert "no device 'opencl:none:0' with kernels" in str(done.exception)


@pytest.mark.slow
def test_one_group_of_checks() -> None:
    (info,) = [each for each in devices_of("numpy") if each.id == "numpy:cpu:0"]
    results = list(run_suite(info, Level.CORE, groups=("strides",)))
    assert [each.name.partition("/")[0] for each in results] == ["strides"] * len(results)
    assert len(results) == len(checks_of(Level.CORE, ("strides",))) > 3
    assert not any(each.failed for each in results)
    with pytest.raises(BackendError, match="no group 'stride' of checks; did you mean strides"):
        checks_of(Level.CORE, ("stride",))
