"""Optimizers: pure update rules that every backend runs."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer as Optimizer
    from hetpipe.optim.rule import multi_step as multi_step
    from hetpipe.optim.rules import adagrad as adagrad
    from hetpipe.optim.rules import adam as adam
    from hetpipe.optim.rules import adamw as adamw
    from hetpipe.optim.rules import lamb as lamb
    from hetpipe.optim.rules import lion as lion
    from hetpipe.optim.rules import rmsprop as rmsprop
    from hetpipe.optim.rules import sgd as sgd
else:
    __getattr__, __dir__ = lazy(__name__)
