"""Run a reader on many files that hypothesis makes, each within limits of time and memory.

In the test suite each test has few cases, and the same cases every time. `HETPIPE_FUZZ=20000` runs
that many cases of each test of a reader, and a fifth as many of a test of commands, with other
cases every time:

    HETPIPE_FUZZ=20000 python -m pytest -s tests/fuzz --timeout 0
"""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from hetpipe.errors import HetpipeError

T = TypeVar("T")

ASKED = int(os.environ.get("HETPIPE_FUZZ", 0))
CASES = 200
MOST_S = 2.0  # of this process's own CPU time, so that a busy machine fails no test
MOST_NBYTES = 1 << 30
MOST_LETTERS = 4000  # of a message, however large the file is
ACCEPTED, REFUSED = "accepted", "refused"


def outcomes(
    files: SearchStrategy[T], attempt: Callable[[T], str], cases: int = CASES
) -> Counter[str]:
    """Count the outcomes of `attempt` by value; hypothesis shrinks and reports its failures."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=ASKED * cases // CASES or cases,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=bool(ASKED),
    )
    @given(files)
    def run(file: T) -> None:
        counts[attempt(file)] += 1

    run()
    if ASKED:
        print(dict(counts))
    return counts


def check_both_ends(counts: Counter[str]) -> None:
    """Check that cases were both accepted and refused; otherwise a test shows little."""
    assert min(counts[ACCEPTED], counts[REFUSED]) > 0, counts


def result_of(read: Callable[[], T], errors: tuple[type[HetpipeError], ...]) -> T | str:
    """Return the result of `read` within the limits, or the message of an error of these types."""
    try:
        with limits():
            return read()
    except HetpipeError as refused:
        if type(refused) not in errors:
            raise
        message = str(refused)
    assert 0 < len(message) <= MOST_LETTERS, f"a message of {len(message)} letters: {message[:200]}"
    return message


@contextmanager
def limits() -> Iterator[None]:
    """Raise `TimeoutError` in code that takes too long, and make large allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MOST_NBYTES, before[1]))
    handler = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"it computes for more than {MOST_S} s")


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
