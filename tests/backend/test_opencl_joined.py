"""Kernels of many files in one source: equal names are kept apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hetpipe.backends.opencl.bundle.merged_source import defined, joined
from hetpipe.backends.opencl.lower.launch import Kernel, with_helpers
from hetpipe.backends.opencl.platform.driver import driver, quiet
from hetpipe.backends.opencl.run.specialise import build
from opencl_devices import IDS, opencl_device

KERNELS = Path(__file__).parents[2] / "kernels"
MANY = """
#define STEP(x) ((x) + BY)
#ifndef BY
#define BY 100
#endif
#define MAKE(name, T) \\
    inline T name##_of(const T x) { return STEP(x); }
MAKE(stepped, float)
typedef struct { float lo, hi; } Pair;
__constant float table[2] = {1.0f, 2.0f};
inline float twice(const float x) { return FACTOR * x; } // two times (or three)
__kernel void run(__global const float *x, __global float *y) {
    const Pair pair = {stepped_of(x[0]), table[1]};
    y[0] = twice(pair.lo) + pair.hi;
}
"""


def test_top_level_names_of_a_text() -> None:
    assert defined(MANY) == {"stepped_of", "Pair", "table", "twice", "run"}
    assert defined("__kernel void f(__global float *x) { const int local_one = 1; }") == {"f"}
    body = "#define BODY { x[0] = 1; }\n__kernel void g(__global int *x) BODY\nvoid h() { int y; }"
    assert defined(body) == {"g", "h"}
    channels = "channel float to_next __attribute__((depth(8)));\n/* float no(x) {} */"
    assert defined(channels) == {"to_next"}


def test_every_kernel_of_every_file_is_found() -> None:
    for path in KERNELS.rglob("*.cl"):
        text = path.read_text()
        names = {line.partition("__kernel void ")[2] for line in text.splitlines()} - {""}
        assert {name.partition("(")[0] for name in names} <= defined(text), path


@pytest.mark.parametrize("device_id", IDS)
def test_parts_with_equal_names_behave_as_when_separate(device_id: str) -> None:
    """The parts define the same functions, types, constants and macros, with different options."""
    generated = [
        Kernel(f"__kernel void fused_{n}(__global const float *x, __global float *y)"
               f"{{ y[0] = x[0] - {n}.0f; }}", f"fused_{n}", generated=True)
        for n in (1, 2)
    ]  # fmt: skip
    kernels = [
        Kernel(MANY, "run", ("-DFACTOR=2.0f",)),
        generated[0],
        Kernel(MANY, "run", ("-DFACTOR=3.0f", "-DBY=1")),
        generated[1],
        Kernel(MANY + "\n", "run", ("-DFACTOR=2.0f",)),
    ]
    (source,) = joined(kernels)
    assert source.options == ()
    assert len(set(source.names.values())) == len(kernels)
    device = opencl_device(device_id)
    cl = driver()
    with quiet():
        program = build(cl, device.context, source.text, source.options)
    results = []
    for kernel in kernels:
        x, y = np.array([5], np.float32), np.zeros(1, np.float32)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffers = [cl.Buffer(device.context, flags, hostbuf=array) for array in (x, y)]
        called = cl.Kernel(program, source.names[kernel])
        called.set_args(*buffers)
        cl.enqueue_nd_range_kernel(device.queue, called, (1,), None)
        cl.enqueue_copy(device.queue, y, buffers[1])
        results.append(float(y[0]))
    assert results == [212.0, 4.0, 20.0, 3.0, 212.0]


def test_options_other_than_macros_need_separate_sources() -> None:
    plain, relaxed = (
        Kernel(MANY, "run", ("-DFACTOR=2.0f", *more)) for more in ((), ("-cl-mad-enable",))
    )
    first, second = joined([plain, relaxed, plain])
    assert (first.options, second.options) == ((), ("-cl-mad-enable",))
    assert first.names == {plain: "run"}
    assert second.names == {relaxed: "run"}


def test_shared_definitions_of_generated_kernels_appear_once() -> None:
    head = "#ifndef SHARED\n#define SHARED\ninline float own(float x) { return x; }\n#endif\n"
    kernels = [Kernel(f"{head}__kernel void k{n}() {{}}", f"k{n}", generated=True) for n in "ab"]
    (source,) = joined(kernels)
    assert source.text.count("float own(") == 1
    assert source.names == {kernels[0]: "ka", kernels[1]: "kb"}


def test_a_type_is_declared_once_per_meaning() -> None:
    text = "typedef WIDE lanes;\n__kernel void run(__global lanes *x) {}\n"
    widths = ("float4", "float8", "float4", "float8")
    kernels = [Kernel(text + "\n" * n, "run", (f"-DWIDE={w}",)) for n, w in enumerate(widths)]
    (source,) = joined(kernels)
    assert source.text.count("typedef WIDE lanes;") == 2
    assert source.text.count("#define lanes lanes_2") == 2


@pytest.mark.parametrize("device_id", IDS)
def test_a_helper_in_the_text_is_not_repeated(device_id: str) -> None:
    """A kernel with an epilogue contains the helpers it calls, so they must not be added again."""
    body = "{{ y[0] = exact_erf(x[0] * {0}.0f); }}"
    kernels = [
        Kernel(with_helpers(f"__kernel void erf_{n}(__global const float *x, __global float *y)"
                            + body.format(n)), f"erf_{n}")
        for n in (1, 2)
    ]  # fmt: skip
    (source,) = joined(kernels)
    device = opencl_device(device_id)
    with quiet():
        program = build(driver(), device.context, source.text, source.options)
    assert {kernel.function_name for kernel in program.all_kernels()} == set(source.names.values())
