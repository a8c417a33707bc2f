"""A step in its own process.

`python -m card.step NAME FUNCTION ARGUMENTS DEVICE SIZE FOLDER LIMIT` runs the function. Shortly
before the limit, in seconds, it prints where each thread is.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from card.setting import Setting, Skipped


def main(
    name: str, function: str, arguments: str, device: str, size: str, folder: str, limit_s: str
) -> None:
    """Run a step, print its errors, and write its file; `arguments` are JSON."""
    faulthandler.dump_traceback_later(0.9 * float(limit_s))
    setting = Setting(name, device, size == "quick", Path(folder))
    setting.keep()
    module, _, called = function.partition(":")
    outcome, text = "passed", ""
    try:
        getattr(import_module(module), called)(setting, *json.loads(arguments))
    except Skipped as reason:
        outcome, text = "skipped", str(reason)
    except Exception as error:
        traceback.print_exc()
        outcome, text = "failed", f"{type(error).__name__}: {error}"
    setting.write(outcome, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
