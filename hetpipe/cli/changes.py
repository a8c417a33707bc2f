"""Options of `hetpipe train` for devices that change or are lost during a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class ChangeOptions:
    """The options for changes of the devices."""

    rebalance: Annotated[
        str | None,
        typer.Option(
            "--rebalance",
            metavar="auto",
            help="auto: layers move between devices when the devices' speeds have changed.",
        ),
    ] = None
    survive: Annotated[
        bool, typer.Option("--survive", help="Continue without devices that are lost.")
    ] = False
    spares: Annotated[
        list[str] | None,
        typer.Option(
            "--spare",
            metavar="MEMBER",
            help="With --survive: a member without layers until another one is lost. Repeatable.",
        ),
    ] = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keywords of `Pipeline`."""
        survive = "auto" if self.survive else "off"
        return {"rebalance": self.rebalance, "survive": survive, "spares": self.spares or ()}
