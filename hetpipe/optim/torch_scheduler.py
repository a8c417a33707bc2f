"""Learning rates of a torch scheduler by the number of the update, from a copy of the scheduler."""

from __future__ import annotations

import copy
import warnings
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import as_number


def rates_of(scheduler: object, optimizer: torch.optim.Optimizer) -> list[Callable[[int], float]]:
    """Return the learning rate of each group as a function of the update's number, from 1.

    Raises `HetpipeError` for a scheduler of another optimizer, for one that has made a step, and
    for one whose learning rates do not depend only on the number of steps.
    """
    _check(scheduler, optimizer)
    assert isinstance(scheduler, LRScheduler)
    rates = _Rates(scheduler)
    return [partial(rates.at, number) for number in range(len(optimizer.param_groups))]


class _Rates:
    """The learning rates of all groups by update. The copy runs as far as a rate was needed."""

    def __init__(self, scheduler: LRScheduler) -> None:
        optimizer, name = scheduler.optimizer, type(scheduler).__name__
        # The copy shares the parameters, which no scheduler changes, and has no state.
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        memo[id(optimizer.state)] = {}
        try:
            self._scheduler = copy.deepcopy(scheduler, memo)
        except Exception as error:
            raise HetpipeError(
                f"{name} cannot be copied, and hetpipe runs a copy of a scheduler ({error}): give "
                "hp.optim's lr a function of the update's number instead"
            ) from error
        self._groups = self._scheduler.optimizer.param_groups
        self._known = [array("d") for _ in self._groups]
        self._settings = copy.deepcopy(self._others())
        self._record()

    def at(self, group: int, update: int) -> float:
        """Return the learning rate of a group in an update. Raises `HetpipeError` if the scheduler
        raises an error."""
        known = self._known[group]
        while len(known) < update:
            self._step()
        return known[update - 1]

    def _step(self) -> None:
        name, count = type(self._scheduler).__name__, len(self._known[0])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that no optimizer steps in between
                self._scheduler.step()
        except Exception as error:
            raise HetpipeError(
                f"{name} has no learning rate for update {count + 1}: {error}"
            ) from error
        if self._others() != self._settings:
            raise HetpipeError(
                f"{name} changes other settings than the learning rate at its step {count}: use a "
                "scheduler that changes only the learning rate"
            )
        self._record()

    def _record(self) -> None:
        for known, group in zip(self._known, self._groups, strict=True):
            known.append(as_number("lr", group["lr"]))

    def _others(self) -> list[list[Any]]:
        """Return all settings of the groups but the learning rates."""
        names = [name for name in self._scheduler.optimizer.defaults if name != "lr"]
        return [[group[name] for name in names] for group in self._groups]


def _check(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise HetpipeError(
            f"scheduler is a {name}: give a scheduler of torch.optim.lr_scheduler, or give "
            "hp.optim's lr a function of the update's number"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise HetpipeError(
            f"{name} needs a metric at each step, and a pipeline has none: use a scheduler that "
            "only counts steps, such as CosineAnnealingLR, or save a checkpoint and load it with "
            "another lr"
        )
    if scheduler.optimizer is not optimizer:
        raise HetpipeError(
            f"{name} belongs to another optimizer, a {type(scheduler.optimizer).__name__}: make it "
            "with the optimizer that you give"
        )
    parts = list(_parts(scheduler))
    if cycling := [part for part in parts if getattr(part, "cycle_momentum", False)]:
        raise HetpipeError(
            f"{type(cycling[0]).__name__} also changes the momentum: make the optimizer and the "
            "scheduler again, with cycle_momentum=False"
        )
    steps = max(getattr(part, "last_epoch", 0) for part in parts)
    if steps > 0:
        raise HetpipeError(
            f"{name} has already made {steps} steps, but its first learning rate is the rate of "
            "update 1: make a new scheduler; hp.Pipeline.load continues at the checkpoint's update"
        )


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers that it combines."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
