"""Child processes that run modules of hetpipe and answer requests over pipes, as lines of JSON.

Threads and cores are set before torch starts. A child calls `pin` first, then `requests`.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetpipe import process
from hetpipe.errors import HetpipeError

LIMIT_S = 10.0  # time limit for a child to exit after the end of its input


class Child:
    """A process `python -m MODULE ARGUMENTS... CORES` with one thread per core, until `close`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        cores: Sequence[int],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        threads = str(len(cores))
        settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            process.command(module, *arguments, ",".join(map(str, cores))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=process.environment({**settings, **(environment or {})}),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def close(self) -> None:
        """End the process."""
        try:
            self.requests.close()
            self.process.wait(LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.answers.close()


def ask(children: Sequence[Child], request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a request to all children and return their answers.

    If a child has died, kill the other children, which may wait for it forever, and raise
    `HetpipeError`.
    """
    answers: dict[Child, dict[str, Any]] = {}
    try:
        for child in children:
            child.requests.write(json.dumps(request) + "\n")
            child.requests.flush()
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.answers, selectors.EVENT_READ, child)
            while len(answers) < len(children):
                for key, _ in selector.select():
                    answers[key.data] = json.loads(key.data.answers.readline())
                    selector.unregister(key.fileobj)
    except (OSError, ValueError) as error:
        for child in children:
            child.process.kill()
        raise HetpipeError(
            f"a process that runs {children[0].module} has died, see above"
        ) from error
    return [answers[child] for child in children]


def pin(cores: str) -> int:
    """Pin the process to cores, such as "0,1", and return their number."""
    numbers = [int(core) for core in cores.split(",")]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)
    return len(numbers)


def requests() -> Iterator[dict[str, Any]]:
    """Yield the requests until standard input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**content: Any) -> None:
    """Send the answer to a request."""
    print(json.dumps(content), flush=True)
