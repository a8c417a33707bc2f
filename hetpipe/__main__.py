"""Runs the command line as `python -m hetpipe`."""

import sys
from pathlib import Path

# Python searches the working directory first, so a `queue.py` there would hide the standard one.
if sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd():
    sys.path.append(sys.path.pop(0))

from hetpipe.cli import main

main()
