"""The parts of a specification that are missing: what the user has to write, and a draft of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hetpipe.errors import BackendError
from hetpipe.files import write_beside
from hetpipe.records import read_text
from hetpipe.sdk.formats.kernelspec import KernelSpec
from hetpipe.sdk.kernels import KernelRunner, Outline
from hetpipe.words import choices, words
from hetpipe.workbench.draft import draft
from hetpipe.workbench.runners import runner_of


def check_arguments(
    spec: KernelSpec, path: Path, runner: KernelRunner, text: str, functions: Sequence[str]
) -> None:
    """Raise `BackendError` if the parameters of the kernels are not the arguments of `spec`."""
    options = spec.options_of(spec.cases[0])
    outlines = [runner.outline(text, name, options) for name in functions]
    declared = {each.name: each for some in outlines if some for each in some.parameters}
    if not declared:
        return
    for name in spec.argument:
        if name not in declared:
            raise BackendError(
                f"{path} has [argument.{name}], but kernel {words(functions)} has no parameter "
                f"{name}; {choices(name, declared)}"
            )
    for name, each in declared.items():
        if name not in spec.argument:
            raise BackendError(
                f"{path} lacks [argument.{name}] for the parameter {each.text} of kernel "
                f"{words(functions)}"
            )


def lacking(source: Path, spec_path: Path, runner: KernelRunner, text: str) -> str:
    """Return a message about a missing specification: the kernels, and the command for a draft."""
    names = runner.functions(text)
    lines = [f"{spec_path} is missing: the specification of the kernel's arguments and results"]
    for name in names:
        lines.append(f"  kernel {name}")
        with suppress(BackendError):  # macros may hide the parameters
            lines += _parameters(runner.outline(text, name))
    option = "" if spec_path == source.with_suffix(".toml") else f" --spec {spec_path}"
    function = " --function NAME" if len(names) > 1 else ""
    lines.append("This command writes a draft:")
    lines.append(f"  hetpipe kernels test {source}{option}{function} --init")
    return "\n".join(lines)


def _parameters(outline: Outline | None) -> Iterator[str]:
    for each in outline.parameters if outline else ():
        uses = ", ".join(sorted(each.uses)) if each.space else ""
        yield f"    {each.text}{f'  ({uses})' if uses else ''}"


def write_draft(source: Path, spec_path: Path, function: str = "") -> str:
    """Write a draft of a specification, and return the kernel's name.

    Raises `BackendError` if the file exists, or if no draft can be made.
    """
    runner = runner_of(source)
    text = read_text(source, BackendError)
    names = runner.functions(text)
    if os.path.lexists(spec_path):
        raise BackendError(
            f"{spec_path} exists already, and --init overwrites no file: name another file with "
            "--spec, or remove it"
        )
    if not names:
        raise BackendError(f"{source} has no kernel; declare one: __kernel void NAME(...)")
    if not function and len(names) > 1:
        raise BackendError(
            f"{source} has {len(names)} kernels: name one with --function NAME ({words(names)})"
        )
    chosen = function or names[0]
    if chosen not in names:
        raise BackendError(f"{source} has no kernel {chosen!r}; {choices(chosen, names)}")
    outline = runner.outline(text, chosen)
    if outline is None:
        raise BackendError(
            f"the backend for {source.suffix} files does not read parameters: write {spec_path} "
            "by hand"
        )
    write_beside(spec_path, draft(outline, source, len(names) == 1))
    return chosen
