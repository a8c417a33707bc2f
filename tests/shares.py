"""Wide tables of cases, of which a run may take a share.

A function marked `wide` has many cases that are alike: other sizes, devices, models. `--share 2`
runs every fifth case of each such function, in a fixed order without a pattern. `--share commit`
takes the share that the checked-out commit decides: a commit always has the same tests, and a few
commits have them all. Without the option every case runs.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path
from zlib import crc32

import pytest

SHARES = 5
ALL = "all"
OF_COMMIT = "commit"


def add_option(parser: pytest.Parser) -> None:
    """`--share`."""
    numbers = [str(number) for number in range(1, SHARES + 1)]
    parser.addoption(
        "--share",
        default=ALL,
        choices=[ALL, OF_COMMIT, *numbers],
        help=f"run one of {SHARES} shares of the cases of functions marked `wide`, or the share "
        f"of the checked-out commit; {ALL}, the default, runs every case",
    )


def share_of(config: pytest.Config) -> int | None:
    """The share to run, from 1, or None for all."""
    asked: str = config.getoption("--share")
    if asked == ALL:
        return None
    return share_of_commit(_commit(config.rootpath)) if asked == OF_COMMIT else int(asked)


def share_of_commit(commit: str) -> int:
    """The share, from 1, of a commit's hash."""
    return int(commit, 16) % SHARES + 1


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of `items` the cases of other shares."""
    share = share_of(config)
    if share is None:
        return
    others = left_out(items, share)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def left_out(items: list[pytest.Item], share: int) -> set[pytest.Item]:
    """The cases of wide functions that another share has."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("wide") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    return {
        case
        for own in cases.values()
        for at, case in enumerate(sorted(own, key=lambda item: crc32(item.nodeid.encode())))
        if at % SHARES != share - 1
    }


def _commit(root: Path) -> str:
    """The hash of the checked-out commit; where git knows none, the number of the day."""
    # A checkout may belong to another user than the one who tests it.
    asked = ["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{date.today().toordinal():x}"
