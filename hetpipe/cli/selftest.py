"""A device's self-test in a process of its own: a driver that crashes or hangs harms nothing else.

`python -m hetpipe.cli.selftest DEVICE` prints the result as one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LIMIT_S = 60.0  # the test itself takes ten seconds at most; torch and drivers load before it


def run_selftest(device_id: str) -> dict[str, Any]:
    """{"ok", "detail"} of one device, tested in another process."""
    command = [sys.executable, "-m", __name__, device_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"ok": False, "detail": f"did not end within {LIMIT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"ok": False, "detail": f"its process ended with {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main(device_id: str) -> None:
    """Test the device and print {"ok", "detail"}."""
    from hetpipe.errors import HetpipeError
    from hetpipe.sdk.registry import open_device
    from hetpipe.sdk.selftest import selftest

    try:
        device = open_device(device_id)
        try:
            detail = str(selftest(device))
        finally:
            device.close()
        print(json.dumps({"ok": True, "detail": detail}))
    except HetpipeError as error:
        print(json.dumps({"ok": False, "detail": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1])
