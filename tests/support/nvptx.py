"""Kernels for graphics cards, compiled without a card: by clang and libclc, and NVIDIA's ptxas.

    python tests/support/nvptx.py gpt resnet18      a table of each kernel's registers and memory

The table has the kernels of the models' forwards, backwards and updates. A kernel with a stack
frame or with spilled registers keeps sums in memory, where they are many times slower.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from math import prod
from pathlib import Path

from hetpipe.backends.opencl.bundle.merged_source import joined
from hetpipe.backends.opencl.lower.launch import Kernel, Launch, kernel_source
from hetpipe.backends.opencl.lower.lowering import Lowered, lower
from hetpipe.backends.opencl.lower.target import Target

from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.info import DeviceInfo

CARDS = ("sm_80", "sm_90")
"""The architectures of NVIDIA's A100 and H100."""
AMD_CARD = "gfx90a"
"""The architecture of AMD's MI200."""
REGISTERS, LOCAL_NBYTES = 1 << 16, 48 << 10
"""The most registers and local memory of a work-group."""
VERSION = "7.8"
"""The first version of PTX that both have."""
MODELS = ("digits", "mlp", "gpt", "resnet18", "lstm", "bert-large-small")
NVIDIA, AMD = Path("/usr/lib/clc/nvptx64--nvidiacl.bc"), Path("/usr/lib/clc/amdgcn--amdhsa.bc")
"""OpenCL's built-in functions, of Debian's package libclc-15 or a later one."""


@dataclass(frozen=True)
class Usage:
    """The registers and the bytes of memory that a work-item of a kernel takes on a card."""

    registers: int
    stack_nbytes: int
    spilled_nbytes: int
    local_nbytes: int

    @property
    def fits(self) -> bool:
        """Whether everything that a work-item keeps is in registers."""
        return self.stack_nbytes == self.spilled_nbytes == 0


@dataclass(frozen=True)
class Compiled:
    """A kernel, its file, its largest work-group, its code, and its usage by card."""

    kernel: Kernel
    file: str
    group: int
    ptx: str
    usage: Mapping[str, Usage]

    @property
    def problem(self) -> str:
        """The first card on which the kernel does not fit, and why, or ""."""
        for card, usage in self.usage.items():
            if not usage.fits:
                return f"{card}: {usage.stack_nbytes} B of stack, {usage.spilled_nbytes} spilled"
            if not card.startswith("gfx") and usage.registers * self.group > REGISTERS:
                return f"{card}: {self.group} work-items with {usage.registers} registers"
            if usage.local_nbytes > LOCAL_NBYTES:
                return f"{card}: {usage.local_nbytes} B of local memory"
        return ""


def lacking() -> str:
    """Return the names of the missing tools, or ""."""
    there = {"clang": clang(), "ptxas": ptxas(), "libclc": NVIDIA.is_file() and AMD.is_file()}
    return ", ".join(name for name, found in there.items() if not found)


@cache
def clang() -> str | None:
    """Return the newest clang; PoCL needs one, so Debian installs one with it."""
    names = (*(f"clang-{version}" for version in range(30, 14, -1)), "clang")
    return next(filter(None, map(shutil.which, names)), None)


@cache
def ptxas() -> str | None:
    """Return NVIDIA's assembler, from its wheel or from the path."""
    spec = find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    wheels = [path for folder in folders for path in Path(folder).glob("*/bin/ptxas")]
    return str(wheels[0]) if wheels else shutil.which("ptxas")


def card(
    items: int = 1024, extensions: frozenset[str] = frozenset({"cl_khr_fp64"}), units: int = 108
) -> Target:
    """Return a graphics card with work-groups of at most `items` work-items."""
    info = DeviceInfo(
        "opencl:card:0", "opencl", "gpu", "a card", "NVIDIA Corporation", "none", 80 << 30,
        "opencl:card:0", ("float32", "int64", "int32", "int16", "int8", "uint8", "bool", "float64"),
        cast_dtypes=("float16",),
    )  # fmt: skip
    return Target(info, items, units, LOCAL_NBYTES, 512, extensions, family="gpu")


def lowered(model: str, target: Target) -> dict[str, Lowered]:
    """Return a workload's forward, backward and update as one stage on the card."""
    from hetpipe.study.models import of_model
    from hetpipe.zoo.load import optimizer_of

    subject, backend = of_model(model), get_backend("opencl")
    (stage,) = subject.captured().stage_graphs(
        [], [backend.decompositions()], [subject.samples], optimizer_of(subject.workload), extras=()
    )
    passes = stage.passes[subject.samples]
    programs = {"forward": passes.forward, "backward": passes.backward, "update": stage.update}
    return {
        name: lower(program.graph, target)
        for name, program in programs.items()
        if program is not None
    }


def compiled(launches: Iterable[Launch], cards: Sequence[str] = CARDS) -> list[Compiled]:
    """Compile the kernels of the launches. Raises `RuntimeError` with a compiler's messages."""
    groups: dict[Kernel, int] = {}
    for launch in launches:
        size = prod(launch.local_size or (1,))
        groups[launch.kernel] = max(size, groups.get(launch.kernel, 1))
    found = []
    for source in joined(groups):
        ptx = ptx_of(source.text, source.options)
        usage = {
            card: of_amd(source.text, source.options, card)
            if card.startswith("gfx")
            else of_nvidia("".join(ptx.values()), card)
            for card in cards
        }
        found += [
            Compiled(
                kernel, file_of(kernel), groups[kernel], ptx[name],
                {card: usage[card][name] for card in cards},
            )
            for kernel, name in source.names.items()
        ]  # fmt: skip
    return found


def ptx_of(text: str, options: Sequence[str] = ()) -> dict[str, str]:
    """Compile OpenCL to PTX; return the text of each kernel, and the text before them under ""."""
    target = ["-target", "nvptx64-nvidia-nvcl", "-Xclang", "-target-cpu", "-Xclang", CARDS[0]]
    done = _run([*_clang(NVIDIA), *target, *options, "-", "-o", "-"], text)
    parts = re.split(r"^(?=\.entry |\t// \.globl)", done.stdout, flags=re.MULTILINE)
    names = [re.search(r"^\.entry (\w+)", part, re.MULTILINE) for part in parts]
    texts = {"": ""}
    for name, part in zip(names, parts, strict=True):
        key = "" if name is None else name[1]
        texts[key] = texts.get(key, "") + part
    return texts


def of_nvidia(ptx: str, card: str) -> dict[str, Usage]:
    """Return what each kernel takes on a card of NVIDIA's, as ptxas reports it."""
    head = f".version {VERSION}\n.target {card}"  # an older clang writes an older version
    ptx = re.sub(r"^\.version .*\n\.target .*$", head, ptx, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = _run([str(ptxas()), f"-arch={card}", "-v", file.name, "-o", "/dev/null"])
    spilled = r"(\d+) bytes spill stores", r"(\d+) bytes spill loads"
    return {
        part.partition("'")[0]: Usage(
            _sum(part, r"Used (\d+) registers"),
            _sum(part, r"(\d+) bytes stack frame"),
            _sum(part, *spilled),
            _sum(part, r"(\d+) bytes smem"),
        )
        for part in done.stderr.split("Compiling entry function '")[1:]
    }


def of_amd(text: str, options: Sequence[str], card: str) -> dict[str, Usage]:
    """Return what each kernel takes on a card of AMD's, as clang reports it."""
    target = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={card}", "-nogpulib"]
    remarks = "-Rpass-analysis=kernel-resource-usage"
    # clang fails after its remarks if a stack frame is above 128 KiB.
    done = _run(
        [*_clang(AMD), *target, remarks, *options, "-", "-o", "/dev/null"], text, "exceeds limit"
    )
    # Scalar registers spill to vector registers, which costs no memory.
    return {
        part.split()[0]: Usage(
            _sum(part, r" VGPRs: (\d+)"),
            _sum(part, r"ScratchSize .*?: (\d+)"),
            4 * _sum(part, r"VGPRs Spill: (\d+)"),
            _sum(part, r"LDS Size .*?: (\d+)"),
        )
        for part in done.stderr.split("Function Name: ")[1:]
    }


def _clang(library: Path) -> list[str]:
    linked = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(library)]
    return [str(clang()), "-x", "cl", "-cl-std=CL1.2", "-O3", "-S", "-w", *linked]


def _run(
    command: Sequence[str], text: str = "", unless: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler; raise `RuntimeError` if it fails, except with `unless` in its messages."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode and (unless is None or unless not in done.stderr):
        raise RuntimeError(f"{command[0]}: {done.stderr[-2000:]}")
    return done


def _sum(text: str, *patterns: str) -> int:
    """Return the sum of the numbers that the patterns find, 0 for a pattern without a match."""
    return sum(int(found[1]) for each in patterns if (found := re.search(each, text)))


def file_of(kernel: Kernel) -> str:
    """Return the last of the files of `hetpipe.kernels` that the kernel's text consists of."""
    if kernel.generated:
        return "generated"
    inside = [path for path in _files() if kernel_source(path) in kernel.source]
    return max(inside, key=lambda path: kernel.source.index(kernel_source(path)), default="?")


@cache
def _files() -> tuple[str, ...]:
    root = Path(str(files("hetpipe.kernels")))
    return tuple(str(path.relative_to(root)) for path in root.rglob("*.cl"))


def rows(found: Iterable[Compiled], cards: Sequence[str] = CARDS) -> list[list[str]]:
    """Return a table of the kernels; kernels that do not fit come first."""
    head = ["kernel", "file", "options", "items", *(f"regs/stack/spill {card}" for card in cards)]
    body = [
        [
            each.kernel.name, each.file,
            " ".join(option.removeprefix("-D") for option in each.kernel.options),
            str(each.group),
            *(f"{u.registers}/{u.stack_nbytes}/{u.spilled_nbytes}" for u in each.usage.values()),
        ]
        for each in sorted(found, key=lambda each: not each.problem)
    ]  # fmt: skip
    return [head, *body]


def show(table: Sequence[Sequence[str]]) -> None:
    """Print a table in columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--amd", action="store_true", help="also for AMD's gfx90a")
    parser.add_argument("--items", type=int, default=1024, help="most work-items of a work-group")
    parser.add_argument("--only", default="", help="a part of the file's or the kernel's name")
    parser.add_argument("--bad", action="store_true", help="only kernels with a stack or spills")
    parser.add_argument("--out", type=Path, help="a folder for the PTX of each kernel")
    given = parser.parse_args()
    if missing := lacking():
        sys.exit(f"missing: {missing}; install clang-15, libclc-15 and nvidia-cuda-nvcc-cu12")
    target = card(given.items)
    programs = [program for model in given.models for program in lowered(model, target).values()]
    cards = (*CARDS, AMD_CARD) if given.amd else CARDS
    found = compiled((launch for program in programs for launch in program.launches), cards)
    shown = [
        each for each in found
        if (given.only in each.file or given.only in each.kernel.name)
        and (each.problem or not given.bad)
    ]  # fmt: skip
    show(rows(shown, cards))
    print(f"{len(shown)} of {len(found)} kernels")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        for at, each in enumerate(found):
            (given.out / f"{at}-{each.kernel.name}.ptx").write_text(each.ptx)


if __name__ == "__main__":
    main()
