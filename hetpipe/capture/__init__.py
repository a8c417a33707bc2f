"""Capture: a model and an example batch become layers, and layers become stage graphs.

The package itself can be called: `hp.capture(model, loss_fn, (x, y))`. A function `hp.capture`
would be lost, because every `import hetpipe.capture` binds this name to the package. Type checkers
see the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from hetpipe.buckets import Buckets
    from hetpipe.capture.captured import Captured as Captured
    from hetpipe.capture.captured import capture as capture
    from hetpipe.capture.export.training_modes import EvalModeWarning as EvalModeWarning
else:
    __getattr__, __dir__ = lazy(__name__)


class _Callable(ModuleType):
    def __call__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: tuple[Any, Any],
        buckets: Buckets | Sequence[int] | None = None,
    ) -> Captured:
        """Capture `loss_fn(model(x), y)` from an example batch (x, y); see `Captured`."""
        from hetpipe.capture.captured import capture

        return capture(model, loss_fn, example, buckets)


sys.modules[__name__].__class__ = _Callable
