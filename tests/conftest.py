"""What every test shares."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m pytest` puts the project's folder on the path, where `kernels` and `backends` would
# pass for packages of other projects (transformers looks for one called `kernels`).
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
