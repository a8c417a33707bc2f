"""A metric that returns a dict hides no other value of an epoch."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.errors import HetpipeError
from hetpipe.pipeline.forwards import Means


class Several:
    """Returns several values."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def update(self, output: Any, y: Any) -> None: ...

    def compute(self) -> dict[str, float]:
        return dict.fromkeys(self.names, 1.0)


def means(**metrics: Several) -> Means:
    found: Any = Means(metrics)
    found._weight = found._samples = 1
    return found


@pytest.mark.parametrize("name", ["loss", "eval_loss", "epoch", "first", "near"])
def test_a_name_that_another_value_has_is_refused(name: str) -> None:
    with pytest.raises(HetpipeError, match=f"metric 'second' returned a value {name!r}"):
        means(first=Several("first", "near"), second=Several(name)).result()


def test_a_metric_may_return_a_value_of_its_name() -> None:
    found = means(accuracy=Several("accuracy", "f1")).result().metrics
    assert found == {"accuracy": 1.0, "f1": 1.0}
