"""Starting: shows users the progress of a pipeline's start."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hetpipe.caches import VARIABLE, cache_folder
from hetpipe.report.progress import is_watched, progress_bar

if TYPE_CHECKING:
    from hetpipe.profile.measure import Progress

SLOW_S = 10.0
"""After a start that computed costs or programs for longer than this, a line names the cache."""


class Starting:
    """The progress of a start. `asked` is a function, or whether to show the progress.

    By default it is shown on standard error in a terminal or a notebook.
    """

    def __init__(self, asked: Progress | bool | None) -> None:
        self._begin_s, self._shown = time.monotonic(), ExitStack()
        self._is_silent = asked is False
        self._tells = asked is True or (asked is None and is_watched())
        self.show: Progress = lambda text, done, total: None
        if callable(asked):
            self.show = asked
        elif self._tells:
            self.show = self._shown.enter_context(progress_bar())

    def say(self, line: str) -> None:
        """Print a line, unless the user wants no progress."""
        if not self._is_silent:
            print(line, file=sys.stderr, flush=True)

    def end(self, effort: Mapping[str, int]) -> None:
        """Remove the bar. `effort` has the counts of exports and compilations, if all is well."""
        self._shown.close()
        took_s = time.monotonic() - self._begin_s
        is_cold = effort.get("exports", 0) + effort.get("compilations", 0) > 0
        if self._tells and is_cold and took_s > SLOW_S:
            folder = cache_folder("costs").parent
            print(
                f"the start took {took_s:.0f} s; the next start of this model on these devices is "
                f"shorter, because programs and costs are kept in {folder} ({VARIABLE} names "
                "another folder)",
                file=sys.stderr,
            )
