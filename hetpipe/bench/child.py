"""Modules of ours as processes that answer requests over pipes, a line of JSON each.

Threads and cores are set before torch starts. In the child, `pin` first, then `requests`.
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

LIMIT_S = 10.0  # for a child to exit after its input has ended


class Child:
    """`python -m MODULE ARGUMENTS... CORES`, with one thread per core, until `close`."""

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
    """Every child's answer to the same request.

    Raises `HetpipeError` as soon as one of them has died, and kills the others, which may wait for
    it for ever.
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
    """Pin the process to these cores, "0,1"; returns their number."""
    numbers = [int(core) for core in cores.split(",")]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)
    return len(numbers)


def requests() -> Iterator[dict[str, Any]]:
    """The requests, until standard input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**content: Any) -> None:
    """Answer the request."""
    print(json.dumps(content), flush=True)
