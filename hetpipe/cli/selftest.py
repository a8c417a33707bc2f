"""A device's self-test in a process of its own: a driver that crashes or hangs harms nothing else.

`python -m hetpipe.cli.selftest DEVICE` prints the result as one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hetpipe import process

LIMIT_S = 60.0  # the test itself takes ten seconds at most; torch and drivers load before it


def run_selftest(device_id: str) -> dict[str, Any]:
    """The fields of `SelfTest` for one device, tested in another process."""
    try:
        done = subprocess.run(
            process.command("hetpipe.cli.selftest", device_id),
            env=process.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "message": f"did not end within {LIMIT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"ok": False, "message": f"its process ended with {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main(device_id: str) -> None:
    """Test the device and print the fields of `SelfTest` as JSON."""
    from dataclasses import asdict

    from hetpipe.errors import HetpipeError
    from hetpipe.sdk.registry import open_device
    from hetpipe.sdk.selftest import selftest

    try:
        device = open_device(device_id)
        result = asdict(selftest(device))
        device.close()
    except HetpipeError as error:
        result = {"ok": False, "message": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
