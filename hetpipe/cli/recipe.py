"""Options of `hetpipe train` for the updates and the precision of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import PrecisionOption
from hetpipe.errors import HetpipeError
from hetpipe.optim.check import OPTIMIZERS
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.pipeline.options import UpdateOptions
    from hetpipe.zoo.workload import Workload


@dataclass(frozen=True)
class RecipeOptions:
    """The options that change a workload's training. Raises `HetpipeError` for unknown names."""

    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            autocompletion=complete.optimizer,
            help=f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}, with its usual settings. "
            "\\[default: the model's]",
        ),
    ] = None
    lr: Annotated[
        float | None,
        typer.Option("--lr", min=0, help="Learning rate. \\[default: the optimizer's]"),
    ] = None
    precision: PrecisionOption = None
    clip_norm: Annotated[
        float | None,
        typer.Option("--clip-norm", help="The largest norm of all gradients together."),
    ] = None
    accumulate: Annotated[
        int, typer.Option("--accumulate", min=1, help="Mini-batches for each update.")
    ] = 1

    def __post_init__(self) -> None:
        if self.optimizer not in (None, *OPTIMIZERS):
            hint = choices(self.optimizer, OPTIMIZERS)
            raise HetpipeError(f"no optimizer {self.optimizer!r}; {hint}")
        if self.optimizer == "sgd" and self.lr is None:
            raise HetpipeError("sgd has no usual learning rate: add --lr, for instance --lr 0.05")
        self.updates()  # checks the numbers

    def updates(self) -> UpdateOptions:
        """Return the options of updates. Raises `HetpipeError`."""
        from hetpipe.pipeline.options import UpdateOptions

        return UpdateOptions(clip_norm=self.clip_norm, accumulate=self.accumulate)

    @property
    def why_not_compared(self) -> str:
        """The reason why torch cannot train in the same way, or ""."""
        if self.precision is not None:
            return f"passes compute in {self.precision}"
        from hetpipe.optim.torch_optimizer import CLASSES  # it loads torch

        has_same = self.optimizer in (None, *CLASSES)
        return "" if has_same else f"torch has no optimizer {self.optimizer}"

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keywords of `Pipeline`."""
        names = ("precision", "clip_norm", "accumulate")
        return {name: getattr(self, name) for name in names}

    def change(self, workload: Workload) -> Workload:
        """Return the workload with the chosen optimizer and learning rate."""
        from hetpipe import optim
        from hetpipe.zoo.load import optimizer_of

        if self.optimizer is not None:
            rates = {} if self.lr is None else {"lr": self.lr}
            return replace(workload, optimizer=getattr(optim, self.optimizer)(**rates))
        if self.lr is not None:
            return replace(workload, optimizer=optimizer_of(workload).with_lr(self.lr))
        return workload
