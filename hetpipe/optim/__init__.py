"""Optimizers: pure update rules that every backend runs."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.optim.adams import adam as adam
    from hetpipe.optim.adams import adamax as adamax
    from hetpipe.optim.adams import adamw as adamw
    from hetpipe.optim.adams import nadam as nadam
    from hetpipe.optim.published import lamb as lamb
    from hetpipe.optim.published import lion as lion
    from hetpipe.optim.rule import Optimizer as Optimizer
    from hetpipe.optim.rule import multi_step as multi_step
    from hetpipe.optim.rules import adadelta as adadelta
    from hetpipe.optim.rules import adagrad as adagrad
    from hetpipe.optim.rules import rmsprop as rmsprop
    from hetpipe.optim.rules import sgd as sgd
    from hetpipe.optim.torch_optimizer import from_torch as from_torch
else:
    __getattr__, __dir__ = lazy(__name__)
