"""Starts the checks with the installed hetpipe, and with this folder's parent on the path.

The checkout itself leaves the path: Python would find `hetpipe` there, but not `hetpipe.backends`.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    kept = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
    sys.path[:] = [str(TESTS), *kept]
    from card.run import main

    sys.exit(main())
