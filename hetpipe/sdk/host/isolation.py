"""Isolation of backends: an exception or a missing answer harms only the backend itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hetpipe.errors import BackendError
from hetpipe.process import start_refusal

Result = TypeVar("Result")


class NoAnswerError(BackendError):
    """A backend has not answered in time."""


@contextmanager
def blamed(name: str, problem: str) -> Iterator[None]:
    """Turn exceptions of backend `name` in the block into a `BackendError` that names the backend.

    A `BackendError` and Ctrl-C pass unchanged.
    """
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BackendError(f"backend {name!r} {problem}: {reason}") from error


def ask(name: str, problem: str, limit_s: float, question: Callable[[], Result]) -> Result:
    """Return the answer of backend `name` to a question, which runs in a new thread.

    Raises `BackendError`, "backend NAME PROBLEM: ...", if the question raises anything or takes
    longer than `limit_s`. The thread of an unanswered question keeps running.
    """
    answer: list[Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            with blamed(name, problem):
                answer.append(question())
        except BaseException as error:  # raised again by the thread that asks
            failure.append(error)

    thread = threading.Thread(target=work, name=f"ask {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        reason = start_refusal(error) or str(error)
        raise BackendError(f"backend {name!r} {problem}: {reason}") from error
    thread.join(limit_s)
    if failure:
        raise failure[0]
    if not answer:
        raise NoAnswerError(f"backend {name!r} {problem}: no answer after {limit_s:g} s")
    return answer[0]
