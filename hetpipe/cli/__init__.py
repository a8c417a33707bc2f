"""The command line: `hetpipe --help`. Nothing heavy is imported before a command needs it."""

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
    """Run a command.

    A `HetpipeError` becomes a red message and exit status 1, Ctrl-C becomes exit status 130, and a
    warning becomes one line.
    """
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
        # The interpreter restores the default handler when it ends; a Ctrl-C would then kill it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if next(presses) > 1:
            # If the interrupt came inside `exec` of a text, Python would end itself by a signal.
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, pressed)
    atexit.register(leave)  # registered first, called last
