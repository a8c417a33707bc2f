"""Test an OpenCL kernel of your own, without a board, and find the fault of a wrong kernel.

`hetpipe kernels test my_gelu.cl` does the same from a shell. The kernel runs on Oclgrind, which
interprets every work-item, so it also finds races and accesses out of bounds.
"""

import tempfile
from pathlib import Path

import hetpipe as hp
from hetpipe.workbench.trial import check_sizes, devices_for, outcomes, trial_of

KERNEL = """
__kernel void my_gelu(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    if (i < n)
        y[i] = 0.5f * x[i] * (1.0f + erf(x[i] * 0.70710678f));
}
"""
SPECIFICATION = """
global_size = ["round_up(n, 64)"]
local_size = [64]

[argument.x]
shape = ["n"]
values = "normal"

[argument.y]
shape = ["n"]
output = true

[argument.n]
value = "n"

[expect]
y = "0.5 * x * (1 + erf(x * 0.7071067811865476))"

[[case]]
n = 1000
"""


def faults(kernel: str, folder: Path) -> list[str]:
    """Test a kernel on Oclgrind; return each fault with its line and the command to repeat it."""
    source, specification = folder / "my_gelu.cl", folder / "my_gelu.toml"
    source.write_text(kernel)
    specification.write_text(SPECIFICATION)
    trial = trial_of(source, specification)
    check_sizes(trial)
    results = outcomes(trial, devices_for(source, ["opencl:oclgrind:0"]))
    return [text for result in results for text in trial.texts(result)]


def main() -> None:
    ids = {info.id for info in hp.discover_devices(["opencl"])[0]}
    if "opencl:oclgrind:0" not in ids:
        raise SystemExit("Oclgrind is missing: pip install 'hetpipe[emulators]'")
    with tempfile.TemporaryDirectory() as folder:
        print("faults:", faults(KERNEL, Path(folder)))
        print("faults without the check of i:")
        for text in faults(KERNEL.replace("if (i < n)", ""), Path(folder)):
            print(text)


if __name__ == "__main__":
    main()
