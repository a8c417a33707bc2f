"""Kernels for graphics cards, compiled without a card: by clang, libclc and NVIDIA's ptxas.

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
MODELS = ("digits", "mlp", "gpt", "resnet18", "lstm", "bert-large-small")
LIBRARY = Path("/usr/lib/clc/nvptx64--nvidiacl.bc")
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


def lacking() -> str:
    """Return which tool is missing, or ""."""
    tools = {"clang": clang(), "ptxas": ptxas(), str(LIBRARY): LIBRARY.is_file()}
    return ", ".join(name for name, found in tools.items() if not found)


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
    return Target(info, items, units, 48 << 10, 512, extensions, family="gpu")


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
        texts = ptx_of(source.text, source.options)
        usage = {card: usage_of("".join(texts.values()), card) for card in cards}
        found += [
            Compiled(
                kernel, file_of(kernel), groups[kernel], texts[name],
                {card: usage[card][name] for card in cards},
            )
            for kernel, name in source.names.items()
        ]  # fmt: skip
    return found


def ptx_of(text: str, options: Sequence[str] = ()) -> dict[str, str]:
    """Compile OpenCL to PTX; return the text of each kernel, and what precedes all under ""."""
    command = [
        str(clang()), "-x", "cl", "-cl-std=CL1.2", "-target", "nvptx64-nvidia-nvcl", "-O3", "-S",
        "-Xclang", "-target-cpu", "-Xclang", CARDS[0], "-Xclang", "-mlink-builtin-bitcode",
        "-Xclang", str(LIBRARY), "-w", *options, "-", "-o", "-",
    ]  # fmt: skip
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"clang: {done.stderr[-2000:]}")
    parts = re.split(r"^(?=\.entry |\t// \.globl)", done.stdout, flags=re.MULTILINE)
    names = [re.search(r"^\.entry (\w+)", part, re.MULTILINE) for part in parts]
    texts: dict[str, str] = {"": ""}
    for name, part in zip(names, parts, strict=True):
        if name is None:
            texts[""] += part
        else:
            texts[name[1]] = part
    return texts


def usage_of(ptx: str, card: str) -> dict[str, Usage]:
    """Return what each kernel of a text takes on a card, as ptxas reports it."""
    ptx = re.sub(r"^\.target .*$", f".target {card}", ptx, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas()), f"-arch={card}", "-v", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr[-2000:]}")
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        found[part.partition("'")[0]] = Usage(
            _number(r"Used (\d+) registers", part),
            _number(r"(\d+) bytes stack frame", part),
            _number(r"(\d+) bytes spill stores", part) + _number(r"(\d+) bytes spill loads", part),
            _number(r"(\d+) bytes smem", part),
        )
    return found


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


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
        for each in sorted(found, key=lambda each: all(u.fits for u in each.usage.values()))
    ]  # fmt: skip
    return [head, *body]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--items", type=int, default=1024, help="most work-items of a work-group")
    parser.add_argument("--only", default="", help="a part of the file's or the kernel's name")
    parser.add_argument("--bad", action="store_true", help="only kernels with a stack or spills")
    parser.add_argument("--out", type=Path, help="a folder for the PTX of each kernel")
    given = parser.parse_args()
    if missing := lacking():
        sys.exit(f"missing: {missing}; install clang-15, libclc-15 and nvidia-cuda-nvcc-cu12")
    target = card(given.items)
    programs = [program for model in given.models for program in lowered(model, target).values()]
    found = compiled(launch for program in programs for launch in program.launches)
    shown = [
        each for each in found
        if (given.only in each.file or given.only in each.kernel.name)
        and not (given.bad and all(u.fits for u in each.usage.values()))
    ]  # fmt: skip
    table = rows(shown)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"{len(shown)} of {len(found)} kernels")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        for at, each in enumerate(found):
            (given.out / f"{at}-{each.kernel.name}.ptx").write_text(each.ptx)


if __name__ == "__main__":
    main()
