"""The command line, `hetpipe --help`. Commands import heavy modules only when they run."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import warnings
from contextlib import suppress
from itertools import count
from types import FrameType

INTERRUPTED = 130  # exit status


def main() -> None:
    """Run a command. The exit status is 1 after a `HetpipeError`, and 130 after Ctrl-C."""
    try:
        _run()
    except SystemExit as end:
        if end.code:
            sys.last_value = end  # as for other errors; agents of other hosts are told so
        raise


def _run() -> None:
    end_on_interrupt()
    try:
        from hetpipe.cli.app import app
        from hetpipe.cli.output import complain, warn
        from hetpipe.errors import HetpipeError

        warnings.showwarning = lambda message, *_: warn(str(message))
        try:
            app(prog_name="hetpipe")
        except HetpipeError as error:
            complain(str(error))
            sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def end_on_interrupt() -> None:
    """Make the first Ctrl-C end the command, which then closes its workers within seconds.

    The second Ctrl-C prints a note. The third exits at once, and the workers die with this process.
    """
    presses = count(1)

    def pressed(number: int, frame: FrameType | None) -> None:
        press = next(presses)
        if press == 1:
            raise KeyboardInterrupt
        if press == 2:
            os.write(2, b"closing the workers; Ctrl-C once more exits at once\n")
            return
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # show the cursor, which a progress bar hides
        os._exit(INTERRUPTED)

    def leave() -> None:
        # At its end the interpreter restores the default handler. Then Ctrl-C would kill it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if next(presses) > 1:
            # After an interrupt inside `exec` Python would end by SIGINT, not with a status.
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, pressed)
    atexit.register(leave)  # the function that is registered first is called last
