"""A child that crashes, hangs or prints noise gives an error with a reason, and leaves nothing
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetpipe import process
from hetpipe.child import Child, ChildEnded, ChildError, ChildLate, ask

MODULE = """
import os, signal, subprocess, sys, time
from hetpipe.child import Parent

def serve(parent):
    for request in parent.requests():
        act(parent, request["do"])

def act(parent, what, *arguments):
    if what == "crash":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "exit":
        print("about to leave", file=sys.stderr, flush=True)
        os._exit(3)
    elif what == "hang":
        parent.send({"hangs": os.getpid()})
        time.sleep(600)
    elif what == "print":
        os.write(1, b'{"from": "a driver"}\\n')
        print("some text without an end", end="")
        parent.send({"after": what})
    elif what == "start":
        started = subprocess.Popen(["sleep", "600"])
        parent.send({"started": started.pid})
    elif what == "raise":
        raise ValueError("a wrong value")
    else:
        parent.send({
            "said": what, "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)),
            "variable": os.environ.get("CHILD_TEST"), "folder": os.getcwd(),
            "input": sys.stdin.read(), "arguments": arguments,
        })

if __name__ == "__main__":
    if sys.argv[1:] == ["junk"]:
        print("no message")
        print(42)
        print('{"said": "junk"}', flush=True)
        os.write(1, b"unfinished")
    elif sys.argv[1:] == ["forks"]:
        parent = Parent()
        parent.run_forks(lambda *arguments: act(parent, *arguments))
    else:
        serve(Parent())
"""
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def start(*arguments: object, **options: object) -> Child:
    return Child("child_of_test", *arguments, **options)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ends_in_time(pid: int) -> bool:
    end_s = time.monotonic() + LIMIT_S
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.02)
    return not is_running(pid)


def test_a_child_has_its_variables_cores_and_no_input() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with start(environment={"CHILD_TEST": "yes"}, cores=[core]) as child:
        for word in ("one", "two"):
            child.send({"do": word})
            answer = child.receive(LIMIT_S)
            assert answer["said"] == word
            assert answer["pid"] == child.pid
        assert child.is_alive
    assert (answer["cores"], answer["variable"], answer["input"]) == ([core], "yes", "")
    assert os.sched_getaffinity(0) == before
    assert not child.is_alive
    assert not is_running(child.pid)


@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [
        ("crash", -11, r"child_of_test ended with signal 11 \(SIGSEGV\): about to crash"),
        ("exit", 3, "child_of_test ended with exit status 3: about to leave"),
        ("raise", 1, "exit status 1: ValueError: a wrong value"),
    ],
)
@pytest.mark.parametrize("forks", [False, True])
def test_the_end_of_a_child_has_a_reason(what: str, code: int, reason: str, forks: bool) -> None:
    with start(*["forks"] * forks) as child:
        if forks:
            child.fork(what)
        else:
            child.send({"do": what})
        with pytest.raises(ChildEnded, match=reason) as ended:
            child.receive(LIMIT_S)
        assert ended.value.code == code
        assert child.is_alive == forks
        if not forks:
            with pytest.raises(ChildEnded, match=reason):
                child.send({"do": "nothing"})


def test_a_child_that_hangs_is_late() -> None:
    with start() as child:
        child.send({"do": "hang"})
        pid = child.receive(LIMIT_S)["hangs"]
        with pytest.raises(ChildLate, match=r"child_of_test gave no answer within 0\.2 s"):
            child.receive(0.2)
        assert is_running(pid)
    assert not is_running(pid)


def test_other_output_is_no_message() -> None:
    with start("junk") as child:
        assert child.receive(LIMIT_S) == {"said": "junk"}
        with pytest.raises(ChildEnded) as ended:
            child.receive(LIMIT_S)
        assert ended.value.code == 0
    with start() as child:
        child.send({"do": "print"})
        assert child.receive(LIMIT_S) == {"after": "print"}
        child.send({"do": "raise"})
        with pytest.raises(ChildEnded) as ended:
            child.receive(LIMIT_S)
        assert '{"from": "a driver"}\n' in ended.value.log


def test_the_processes_that_a_child_started_end_with_it() -> None:
    with start() as child:
        child.send({"do": "start"})
        pid = child.receive(LIMIT_S)["started"]
        assert is_running(pid)
        child.send({"do": "crash"})
        begin_s = time.monotonic()
        with pytest.raises(ChildEnded, match="SIGSEGV"):
            child.receive(LIMIT_S)
        assert time.monotonic() - begin_s < LIMIT_S / 2, "although its output is still open"
    assert ends_in_time(pid)


@pytest.mark.parametrize("forks", [False, True])
def test_a_child_ends_with_its_parent(tmp_path: Path, forks: bool) -> None:
    way = "child.fork('hang')" if forks else "child.send({'do': 'hang'})"
    script = f"""
import os, signal, sys
from hetpipe.child import Child
child = Child("child_of_test", *{["forks"] * forks})
{way}
print(child.pid, child.receive()["hangs"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "parent_of_test.py").write_text(script)
    done = subprocess.run(
        process.command("parent_of_test"), env=process.environment(), capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert all(ends_in_time(int(pid)) for pid in done.stdout.split())


def test_an_interrupt_reaches_only_the_parent() -> None:
    with start() as child:
        child.send({"do": "hang"})
        pid = child.receive(LIMIT_S)["hangs"]
        assert os.getpgid(pid) != os.getpgid(0), "the terminal does not interrupt it"
        main = threading.main_thread().ident
        assert main is not None
        # A shell ignores SIGINT in programs that it starts in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            child.receive(LIMIT_S)
        signal.signal(signal.SIGINT, before)
    assert not is_running(pid)


def test_a_fork_has_the_present_folder_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("forks") as child:
        monkeypatch.chdir(tmp_path)
        pids = set()
        for word in ("first", "second"):
            monkeypatch.setenv("CHILD_TEST", word)
            child.fork("say", word, 1)
            answer = child.receive(LIMIT_S)
            assert answer["variable"] == word
            assert answer["folder"] == str(tmp_path)
            assert answer["arguments"] == [word, "1"]
            pids.add(answer["pid"])
        assert len({*pids, child.pid}) == 3
        with pytest.raises(ChildEnded) as ended:
            child.receive(LIMIT_S)
        assert ended.value.code == 0


def test_each_fork_has_a_separate_log() -> None:
    with start("forks") as child:
        for what in ("raise", "crash"):
            child.fork(what)
            with pytest.raises(ChildEnded) as ended:
                child.receive(LIMIT_S)
        assert ended.value.log == "about to crash\n"


def test_a_dead_child_ends_the_wait_for_all() -> None:
    with start() as one, start() as other:
        assert [answer["said"] for answer in ask([one, other], {"do": "word"})] == ["word"] * 2
        one.send({"do": "hang"})
        one.receive(LIMIT_S)
        other.send({"do": "crash"})
        with pytest.raises(ChildEnded, match="SIGSEGV"):
            ask([one, other], {"do": "word"})


def test_a_failed_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(ChildError, match=r"child_of_test cannot be started: .*No such file"):
        start()


@pytest.mark.parametrize("read", [Child.close, Child.__exit__])
def test_a_child_is_closed_more_than_once(read: Callable[[Child], None]) -> None:
    child = start()
    read(child)
    child.close()
    assert not child.is_alive
