"""Writes the skeleton of a vendor's library: the example, the headers and the reader of graphs."""

from __future__ import annotations

from pathlib import Path

from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside
from hetpipe.sdk.host.validation import check_name

from . import include_folder

_README = """# {name}, a library of devices for hetpipe

    make                                              # lib{name}.so
    export HETPIPE_NATIVE=$PWD/lib{name}.so
    hetpipe devices --backends native
    hetpipe conform native --device native:{name}.cpu:0
    hetpipe coverage mlp native:{name}.cpu:0          # the missing operators of a model

`device.c` implements the functions of `include/hetpipe_backend.h`. `elements.c` and `layers.c` have
the operators. The library runs on the processor without any change. Replace its functions with
calls of your driver, and run `hetpipe conform` after each step. `make sanitized` builds the library
and `replay.c` with AddressSanitizer and UndefinedBehaviorSanitizer.
"""


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """Write a library `name` in C into `folder`, and return its files.

    Raises `HetpipeError` if device ids cannot contain the name, or if one of the files exists.
    """
    check_name(name, "a new library")
    ours = include_folder()
    texts = {f"include/{path.name}": path.read_text() for path in sorted(ours.glob("*.[ch]"))}
    for path in sorted((ours / "example").iterdir()):
        if path.suffix in (".c", ".h") or path.name == "Makefile":
            texts[path.name] = _renamed(path.read_text(), name)
    texts["README.md"] = _README.format(name=name)
    if present := [place for place in texts if (folder / place).exists()]:
        raise HetpipeError(f"{folder / present[0]} is there already; give another --folder")
    for place, text in texts.items():
        write_beside(folder / place, text)
    return [folder / place for place in texts]


def _renamed(text: str, name: str) -> str:
    text = text.replace("libexample", f"lib{name}").replace(
        '.name = "example"', f'.name = "{name}"'
    )
    return text.replace("INCLUDE ?= $(HERE)..", "INCLUDE ?= $(HERE)include")
