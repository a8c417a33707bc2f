"""Shares of the slow tests: a run may include a twentieth of them.

A function marked `wide` has many similar cases: other sizes, devices, models. A function marked
`slow` takes seconds: it starts workers, trains, or runs an interpreter of kernels. `--share 2` runs
every twentieth case of each wide function, and every twentieth of all cases of slow functions, in a
fixed pseudorandom order. With `--share tree`, the files of the checked-out commit choose the share:
the same files always have the same tests, and a change of the files changes the cases. Without the
option, every case runs.

A fault that breaks most cases of a table, or most trainings, is found at once, because each share
has cases of each table and a twentieth of the trainings. A fault in a single case is found in one
of twenty runs, so 90 changed trees find it with a probability of 99 %. Before a release, and after
a change that a table or a slow test is about, run every case.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path
from zlib import crc32

import pytest

SHARES = 20
ALL = "all"
OF_TREE = "tree"


def add_option(parser: pytest.Parser) -> None:
    """Add the option `--share` to pytest."""
    numbers = [str(number) for number in range(1, SHARES + 1)]
    parser.addoption(
        "--share",
        default=ALL,
        choices=[ALL, OF_TREE, *numbers],
        help=f"run one of {SHARES} shares of the cases marked `wide` or `slow`, or the share that "
        f"the checked-out files choose; {ALL}, the default, runs every case",
    )


def share_of(config: pytest.Config) -> int | None:
    """Return the share to run, from 1, or None for all."""
    asked: str = config.getoption("--share")
    if asked == ALL:
        return None
    return share_of_tree(_tree(config.rootpath)) if asked == OF_TREE else int(asked)


def share_of_tree(tree: str) -> int:
    """Return the share, from 1, that a tree's hash chooses."""
    return int(tree, 16) % SHARES + 1


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the cases of other shares from `items`."""
    share = share_of(config)
    if share is None:
        return
    others = cases_of_other_shares(items, share)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


def cases_of_other_shares(items: list[pytest.Item], share: int) -> set[pytest.Item]:
    """Return the cases of wide and slow functions that belong to other shares."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("wide") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
        elif item.get_closest_marker("slow") is not None:
            cases["slow"].append(item)
    return {
        case
        for table in cases.values()
        for at, case in enumerate(sorted(table, key=lambda item: crc32(item.nodeid.encode())))
        if at % SHARES != share - 1
    }


def _tree(root: Path) -> str:
    """Return the hash of the committed files; without git, the number of the day.

    The commit's message, author and time are no part of the hash.
    """
    # The user who runs the tests may not own the checkout.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse", "HEAD^{tree}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{date.today().toordinal():x}"
