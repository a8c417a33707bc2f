"""Completions of names for shells: fast, without torch or a driver, and silent after an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress

Names = Callable[[], Iterable[str]]


def _completion(names: Names, *, of_list: bool = False) -> Callable[[str], list[str]]:
    """Return a function that completes a name; with `of_list`, the last name after a comma."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if of_list else ("", "", incomplete)
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]
        return []

    return complete


def _models() -> Iterable[str]:
    from hetpipe.zoo.load import ZOO

    return ZOO


def _clusters() -> Iterable[str]:
    from hetpipe.cluster.published import published_names

    return published_names()


def _boards() -> Iterable[str]:
    from hetpipe.cost.board import board_ids

    return board_ids()


def _schedules() -> Iterable[str]:
    from hetpipe.schedule.rule import schedule_names

    return ["auto", *schedule_names()]


def _policies() -> Iterable[str]:
    from hetpipe.schedule.weights import policy_names

    return ["auto", *policy_names()]


def _planners() -> Iterable[str]:
    from hetpipe.plan.planners.choice import PLANNERS

    return PLANNERS


def _optimizers() -> Iterable[str]:
    from hetpipe.optim.check import OPTIMIZERS

    return OPTIMIZERS


def _backends() -> Iterable[str]:
    from hetpipe.sdk.host.registry import backend_names

    return backend_names()


def _papers() -> Iterable[str]:
    from hetpipe.papers.reproduced.table import PAPERS

    return PAPERS


model = _completion(_models)
cluster = _completion(_clusters)
board = _completion(_boards)
schedule = _completion(_schedules)
schedules = _completion(_schedules, of_list=True)
policy = _completion(_policies)
planner = _completion(_planners)
planners = _completion(_planners, of_list=True)
optimizer = _completion(_optimizers)
backend = _completion(_backends)
backends = _completion(_backends, of_list=True)
paper = _completion(_papers)
