"""Runs the command line as `python -m hetpipe.cli`."""

import sys
from pathlib import Path

# Python puts the working directory first, where a `queue.py` would hide the standard library's.
if sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd():
    sys.path.append(sys.path.pop(0))

from hetpipe.cli import main

main()
