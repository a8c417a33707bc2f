"""The command line: `hetpipe --help`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Run a command. A `HetpipeError` becomes one red line and exit 1; Ctrl-C exits 130.

    A warning is one line, too.
    """
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
        sys.exit(130)
