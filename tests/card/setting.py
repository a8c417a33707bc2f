"""The setting of a step, and the file that the step writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe import process
from hetpipe.files import write_json

HOST = "pytorch:cpu:0"


class Wrong(Exception):
    """A check of a step failed."""


class Skipped(Exception):
    """A step needs something that this machine lacks; the message names it."""


@dataclass
class Setting:
    """The device under test and the place of a step's results.

    `keep` writes the figures at once, so the figures before a crash are not lost.
    """

    step: str
    device: str
    quick: bool
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """torch's name for the type of the device, such as `cuda`."""
        return self.device.split(":")[1]

    @property
    def torch_name(self) -> str:
        """torch's name for the device, such as `cuda:0`."""
        return ":".join(self.device.split(":")[1:])

    @property
    def is_card(self) -> bool:
        return self.kind != "cpu"

    def keep(self, **figures: Any) -> None:
        """Add figures to the step's file."""
        self.figures |= figures
        self.write("unfinished", "")

    def write(self, outcome: str, text: str) -> None:
        data = {"outcome": outcome, "text": text, "figures": self.figures}
        write_json(self.folder / f"{self.step}.json", data)

    def command(self, *arguments: object) -> dict[str, Any]:
        """Run a command of hetpipe and return its JSON. Raises `Wrong` if the command fails.

        The JSON stays in the folder, and the command's text is in the step's log.
        """
        path = self.folder / f"{self.step}-{arguments[0]}.json"
        line = process.command("hetpipe.cli", *arguments, "--json", path)
        code = subprocess.run(line, env=process.environment()).returncode
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.keep(file=path.name)
        if code:
            raise Wrong(f"hetpipe {' '.join(map(str, arguments))} ended with exit status {code}")
        return data


def error_of(action: Callable[[], object], what: str) -> str:
    """Return the text of the `HetpipeError` that an action raises. Raises `Wrong` without one."""
    from hetpipe.errors import HetpipeError

    try:
        action()
    except HetpipeError as error:
        return str(error)
    except Exception as error:
        raise Wrong(f"{what}: {type(error).__name__} instead of a HetpipeError: {error}") from error
    raise Wrong(f"{what}: no error")
