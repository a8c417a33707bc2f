"""The modes of modules, train or eval, at the time of the capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


class EvalModeWarning(UserWarning):
    """The whole model was in eval mode when it was captured for training."""


@dataclass(frozen=True)
class Modes:
    """The mode of every module of a model, and of a loss that is a module, at one moment."""

    model: nn.Module
    training: tuple[tuple[nn.Module, bool], ...]

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Callable[..., Any], trains: bool = True) -> Modes:
        """Return the present modes or, if nothing trains, eval mode for all modules."""
        modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
        return cls(model, tuple((module, trains and module.training) for module in modules))

    def warn(self) -> None:
        """Warn if no module of the model trains, which is rarely intended."""
        modules = set(self.model.modules())
        if not any(training for module, training in self.training if module in modules):
            warnings.warn(
                f"{type(self.model).__name__} is in eval mode as a whole, and is trained in it: "
                "dropout is off and batch norms keep their running statistics (from_pretrained "
                "returns such a model); call model.train() before the model is captured, and "
                "eval() only on parts that are frozen",
                EvalModeWarning,
                stacklevel=3,  # the caller of Captured
            )

    @contextmanager
    def apply(self, evaluation: bool = False) -> Iterator[None]:
        """Set the recorded modes inside the block; with `evaluation`, eval mode."""
        modules = {*self.model.modules(), *(module for module, _ in self.training)}
        present = [(module, module.training) for module in modules]
        try:
            _set(self.training)
            if evaluation:
                _set((module, False) for module, _ in self.training)
                self.model.eval()
            yield
        finally:
            _set(present)


def _set(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:  # train() is not called: models may override it
        module.training = training
