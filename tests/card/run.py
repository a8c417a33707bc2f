"""Runs the steps one after another, each in a child process with a time limit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from card.steps import STEPS, TOTAL_S, Step
from hetpipe import process
from hetpipe.files import write_json

VERSION = 1  # of the JSON format
RESULTS = "card.json"
LEAST_S = 5.0
"""A step that has less time does not start."""
GOOD = ("passed", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 0 if no step failed."""
    asked = _parser().parse_args(arguments)
    device = asked.device or default_device()
    asked.out.mkdir(parents=True, exist_ok=True)
    names = asked.only or [step.name for step in STEPS]
    end_s = time.monotonic() + 60 * asked.minutes
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for step in STEPS:
            if step.name not in names:
                continue
            limit_s = min(step.limit_s * asked.patience, end_s - time.monotonic())
            records.append(run(step, device, asked.quick, asked.out, limit_s, Path(cache)))
            passed = all(record["outcome"] in GOOD for record in records)
            write_json(
                asked.out / RESULTS,
                {
                    "version": VERSION,
                    "device": device,
                    "quick": asked.quick,
                    "passed": passed and len(records) == len(names),
                    "steps": records,
                },
            )
            print(_line(records[-1]), flush=True)
    return 0 if passed else 1


def run(
    step: Step, device: str, quick: bool, folder: Path, limit_s: float, cache: Path
) -> dict[str, Any]:
    """Run a step and return its record; kill the step's processes after `limit_s`."""
    record = {"name": step.name, "limit_s": limit_s, "seconds": 0.0}
    if limit_s < LEAST_S:
        return {**record, "outcome": "not run", "text": "the time of all steps is over"}
    path = folder / f"{step.name}.json"
    path.unlink(missing_ok=True)
    size = "quick" if quick else "full"
    what = (step.name, step.function, json.dumps(step.arguments))
    line = process.command("card.step", *what, device, size, folder.resolve(), limit_s)
    begin_s = time.monotonic()
    with (folder / f"{step.name}.log").open("wb") as log:
        child = subprocess.Popen(
            line, env=process.environment({"HETPIPE_CACHE": str(cache)}), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    record["seconds"] = time.monotonic() - begin_s
    return {**record, **_ended(path, code, limit_s)}


def default_device() -> str:
    """Return the first accelerator of torch; ask in another process, which opens no card here."""
    code = "import torch; print(getattr(torch.accelerator.current_accelerator(True), 'type', ''))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kind = asked.stdout.strip()
    if not kind:
        sys.exit(
            "torch finds no accelerator on this machine; name a device, such as "
            f"--device pytorch:cpu:0 --quick\n{asked.stderr}"
        )
    return f"pytorch:{kind}:0"


def _ended(path: Path, code: int | None, limit_s: float) -> dict[str, Any]:
    """Return outcome, text and figures of a step; a crashed step has its figures up to then."""
    written: dict[str, Any] = {"figures": {}}
    with suppress(OSError):
        written = json.loads(path.read_text(encoding="utf-8"))
    if code is None:
        return {**written, "outcome": "late", "text": f"not done after {limit_s:.0f} s"}
    if code or written.get("outcome") in (None, "unfinished"):
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return {**written, "outcome": "crashed", "text": f"the process ended with {how}"}
    return written


def _line(record: Mapping[str, Any]) -> str:
    text = f"{record['outcome']:>8}  {record['name']} ({record['seconds']:.0f} s)"
    return f"{text}: {record['text']}" if record["text"] else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.card", description="Check hetpipe on a card.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", help="a device's id [default: torch's first accelerator]")
    parser.add_argument("--quick", action="store_true", help="small models, fewer checks")
    parser.add_argument(
        "--only",
        action="append",
        choices=[step.name for step in STEPS],
        help="one step; repeatable",
    )
    parser.add_argument(
        "--minutes", type=float, default=TOTAL_S / 60, help="time limit of all steps [default: 20]"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor of the steps' limits, for a busy machine",
    )
    return parser
