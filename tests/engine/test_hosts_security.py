"""Whoever lacks the secret of the hosts can neither run code on them nor disturb a training."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agents import SECRET, end, free_address, patched_secret, start_agent
from crews import eventually
from test_hosts import DEVICE, train

from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.crew.plugboard import Outside
from hetpipe.errors import ClusterError
from hetpipe.hosts import meeting
from hetpipe.hosts.door import MOST_HANDSHAKES, Call, Door, Visitor, dial
from hetpipe.hosts.facts import Facts, own_facts
from hetpipe.hosts.secret import _own_secret, find_secret, write_secret
from hetpipe.hosts.tls import RefusedError, TlsStream
from hetpipe.hosts.wires import Wires
from hetpipe.wire.stream import StreamPort

Address = tuple[str, int]
RIGHT, WRONG = SECRET.encode(), b"another secret of these tests"
ZEROS_NBYTES = 100 << 20


class Target(NamedTuple):
    """A door, the process that listens, and the purposes that it answers."""

    address: Address
    process: int
    purposes: tuple[str, ...]


class Bomb:
    """Writes a file if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


class Room(NamedTuple):
    """Hosts in a training, and the losses that it must have."""

    targets: dict[str, Target]
    crew: Crew
    losses: list[float]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    """Start a training of this process and an agent, and beside it an agent that stays."""
    meet, listen = free_address(), free_address()
    joining = start_agent("--meet", meet, "--name", "h1")
    staying = start_agent("--stay", "--listen", listen, "--name", "h2")
    with ExitStack() as stack:
        stack.callback(end, joining)
        stack.callback(end, staying)
        stack.callback(staying.kill)
        with patched_secret():
            devices = [f"h0/{DEVICE}", f"h1/{DEVICE}"]
            cluster = Cluster.hosts(meet, 2, name="h0", limit_s=60, devices=devices)
        hosts = cluster.connections
        assert hosts is not None
        stack.callback(hosts.close)
        crew = stack.enter_context(Crew.start(cluster))
        assert staying.stdout is not None
        assert "listens" in staying.stdout.readline()
        targets = {
            "controller": Target(hosts.door.address, os.getpid(), (meeting.JOIN, meeting.WIRE)),
            "agent": Target(hosts.others["h1"].door, joining.pid, (meeting.WIRE,)),
            "staying": Target(
                meeting.parse_address(listen), staying.pid, (meeting.CONTROL, meeting.WIRE)
            ),
        }
        yield Room(targets, crew, _losses(crew))


def _losses(crew: Crew) -> list[float]:
    return train(crew, [f"h0/{DEVICE}", f"h1/{DEVICE}"], "1f1b")


@pytest.fixture(params=["controller", "agent", "staying"])
def target(room: Room, request: pytest.FixtureRequest) -> Iterator[Target]:
    """A door. After the test its process has the threads and files that it had, and a training has
    its losses."""
    target = room.targets[request.param]
    before = _holds(target.process)
    yield target
    assert _losses(room.crew) == room.losses
    assert eventually(lambda: _holds(target.process) <= before), (before, _holds(target.process))


def _holds(process: int) -> tuple[int, int]:
    """Return the number of a process's threads and of its sockets."""
    files = Path(f"/proc/{process}/fd")
    links = []
    for file in files.iterdir():
        with suppress(OSError):
            links.append(os.readlink(file))
    tasks = len(list(Path(f"/proc/{process}/task").iterdir()))
    return tasks, sum(link.startswith("socket:") for link in links)


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=5.0)


def is_cut(sock: socket.socket, limit_s: float = 15.0) -> bool:
    """Return whether the other end closes a connection without a word beyond TLS's alerts."""
    sock.settimeout(limit_s)
    heard = b""
    with suppress(ConnectionError):
        while data := sock.recv(4096):
            heard += data
    return len(heard) < 4096 and b"facts" not in heard


def greet(address: Address, message: bytes, secret: bytes = RIGHT) -> dict[str, Any] | None:
    """Send a greeting; return the answer, or None if there is none."""
    with connect(address) as sock:
        stream = TlsStream(sock, secret, server=False)
        stream.sendall(message)
        try:
            (nbytes,) = struct.unpack("<I", stream.receive(4))
            answer = json.loads(stream.receive(nbytes))
        except EOFError:
            return None
        assert is_cut(sock)
        return dict(answer)


def framed(message: Any) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("<I", len(data)) + data


def message(purpose: str, facts: dict[str, Any] | None = None, **call: Any) -> dict[str, Any]:
    """Return a greeting as a host would send it, with some changes."""
    calls = asdict(Call(purpose)) | call
    return {"call": calls, "facts": asdict(own_facts("guest")) | (facts or {})}


def test_a_pickle_is_never_loaded(target: Target, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    with connect(target.address) as sock:
        sock.sendall(bomb)
        sock.shutdown(socket.SHUT_WR)
        assert is_cut(sock)
    with suppress(RefusedError, OSError):
        greet(target.address, framed(bomb), WRONG)
    assert greet(target.address, framed(bomb)) is None
    assert greet(target.address, bomb) is None
    assert not list(tmp_path.iterdir())


def test_garbage_is_cut(target: Target) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"\x16\x03"):
        with connect(target.address) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert is_cut(sock)


def test_an_endless_stream_of_zeros_is_cut(target: Target) -> None:
    zeros, sent_nbytes = bytes(1 << 20), 0
    with connect(target.address) as sock, suppress(ConnectionError):
        while sent_nbytes < ZEROS_NBYTES:
            sent_nbytes += sock.send(zeros)
    assert sent_nbytes < ZEROS_NBYTES


def test_another_secret_is_refused_on_both_ends(target: Target) -> None:
    with connect(target.address) as sock, pytest.raises(RefusedError):
        TlsStream(sock, WRONG, server=False)


def test_a_caller_that_trusts_anybody_is_refused(target: Target) -> None:
    """The caller's certificate is of another secret, or it has none."""
    import ssl

    from hetpipe.hosts.tls import tls_context

    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls_context(WRONG, server=False)):
        verified = context.verify_mode
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with connect(target.address) as sock, context.wrap_socket(sock) as tls:
            with suppress(OSError):
                tls.sendall(framed(message(target.purposes[0])))
            heard = b""
            with suppress(OSError):
                heard = tls.recv(1)
            assert not heard
        context.verify_mode = verified


def test_many_silent_callers_do_not_lock_out_hosts(target: Target) -> None:
    """Each has begun a handshake, and stays silent."""
    hello = _client_hello()
    with ExitStack() as stack:
        for _ in range(2 * MOST_HANDSHAKES):
            sock = stack.enter_context(connect(target.address))
            sock.sendall(hello)
        begin_s = time.monotonic()
        answer = greet(target.address, framed(message("unknown")))
        assert time.monotonic() - begin_s < 5.0
        assert answer is not None
        assert "'unknown'" in answer["refused"]


def _client_hello() -> bytes:
    import ssl

    arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = context.wrap_bio(arriving, leaving, server_hostname="h")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return leaving.read()


DEEP = b"[" * 60_000


NO_OBJECTS = {
    "huge": struct.pack("<I", 1 << 30) + b"{",
    "list": framed([]),
    "null": framed(None),
    "text": framed("text"),
    "bytes": framed(b"\xff\xfe no text"),
    "half": framed(b"{"),
    "deep": framed(DEEP),
    "empty": framed(b""),
}


def test_a_greeting_that_is_no_object_gets_no_answer(target: Target) -> None:
    answers = {name: greet(target.address, raw) for name, raw in NO_OBJECTS.items()}
    assert answers == dict.fromkeys(NO_OBJECTS)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda purpose: {}, "does not understand"),
        (lambda purpose: {"call": [], "facts": []}, "does not understand"),
        (lambda purpose: {**message(purpose), "facts": None}, "does not understand"),
        (lambda purpose: message(purpose, {"cores": "many"}), "no cores"),
        (lambda purpose: message(purpose, {"more": 1}), "no Facts"),
        (lambda purpose: message(purpose, {"name": "a/b"}), "no name of a host"),
        (lambda purpose: message(purpose, {"name": "a\x1b[2J"}), "no name of Facts"),
        (lambda purpose: message(purpose, {"name": "x" * 10_000}), "no name of Facts"),
        (lambda purpose: message(purpose, {"name": ""}), "no name of a host"),
        (lambda purpose: message(purpose, {"hetpipe": "0.0.1"}), "install one version"),
        (lambda purpose: message(purpose, {"hetpipe": 7}), "no hetpipe"),
        (lambda purpose: message(purpose, door=1 << 16), "is no port"),
        (lambda purpose: message(purpose, door=-1), "is no port"),
        (lambda purpose: message(purpose, rank=True), "no rank"),
        (lambda purpose: message("\x07" * 9), "no purpose"),
        (lambda purpose: message("__class__"), "does not answer"),
        (lambda purpose: message(meeting.WIRE, wire="another/1"), "no crew with a wire"),
        (lambda purpose: message(meeting.WIRE, wire=""), "no crew with a wire"),
    ],
)
def test_a_wrong_greeting_is_refused_with_a_reason(
    room: Room, wrong: Callable[[str], dict[str, Any]], words: str
) -> None:
    for target in room.targets.values():
        answer = greet(target.address, framed(wrong(target.purposes[0])))
        assert answer is not None
        assert words in answer["refused"]
        assert answer["refused"].isprintable()


def test_a_host_too_many_is_refused(room: Room) -> None:
    answer = greet(room.targets["controller"].address, framed(message(meeting.JOIN, door=1)))
    assert answer is not None
    assert "all 2 hosts have met" in answer["refused"]


@pytest.fixture
def wires() -> Iterator[tuple[Wires, Address]]:
    wires = Wires()
    door = Door(("127.0.0.1", 0), RIGHT, own_facts("b"), {meeting.WIRE: wires.visitor})
    yield wires, door.address
    door.close()


def _wire(address: Address, name: str) -> TlsStream:
    return dial(address, RIGHT, own_facts("a"), Call(meeting.WIRE, wire=name))[0]


def test_only_the_first_connection_becomes_a_wire(wires: tuple[Wires, Address]) -> None:
    expecting, address = wires
    expecting.open("crew")
    with socket.socket(fileno=expecting.expect("crew/1")) as worker:
        first = _wire(address, "crew/1")
        with pytest.raises(ClusterError, match="'crew/1' is connected already"):
            _wire(address, "crew/1")
        _, (descriptor,), _, _ = socket.recv_fds(worker, 1, 1)
    with socket.socket(fileno=descriptor) as accepted:
        first.socket.sendall(b"tensors")
        assert accepted.recv(16) == b"tensors"
    first.close()


def test_wires_that_arrive_first_are_closed_with_their_crew(wires: tuple[Wires, Address]) -> None:
    expecting, address = wires
    expecting.open("crew")
    early = _wire(address, "crew/1")
    expecting.forget("crew")
    assert early.socket.recv(1) == b""
    early.close()
    with pytest.raises(ClusterError, match="no crew with a wire 'crew/1'"):
        _wire(address, "crew/1")


def test_two_hosts_cannot_join_at_once_for_one_place() -> None:
    joined: list[str] = []

    def visit(stream: TlsStream, greeting: Any) -> None:
        time.sleep(0.05)
        joined.append(greeting.facts.name)
        stream.close()

    check = Visitor(lambda greeting: "one is here" if joined else "", visit)
    door = Door(("127.0.0.1", 0), RIGHT, own_facts("b"), {meeting.JOIN: check})
    answers: list[Any] = []

    def join(name: str) -> None:
        try:
            stream, facts = dial(door.address, RIGHT, own_facts(name), Call(meeting.JOIN))
            stream.close()
            answers.append(facts)
        except ClusterError as error:
            answers.append(error)

    threads = [threading.Thread(target=join, args=(f"a{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    door.close()
    assert len(joined) == 1
    assert sum(isinstance(answer, ClusterError) for answer in answers) == 3


class Impostor:
    """Listens, and answers each caller in its own way."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.address: Address = self._server.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError, RefusedError, EOFError):
            sock, _ = self._server.accept()
            with sock:
                self._answer(sock)

    def close(self) -> None:
        self._server.close()


def _with_other_secret(sock: socket.socket) -> None:
    TlsStream(sock, WRONG, server=True)


def _with_garbage(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    sock.recv(1)


def _with_answer(answer: Any) -> Callable[[socket.socket], None]:
    def send(sock: socket.socket) -> None:
        stream = TlsStream(sock, RIGHT, server=True)
        stream.receive(4)
        stream.sendall(framed(answer))
        sock.recv(1)

    return send


FACTS = Facts("b", "", "", "", 1, "0.0.1", "", "", "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_with_other_secret, "another secret, or is no host"),
        (_with_garbage, "another secret, or is no host"),
        (_with_answer([]), "no JSON object"),
        (_with_answer({}), "no host's"),
        (_with_answer({"refused": "", "facts": {}}), "no host's"),
        (_with_answer({"refused": "", "facts": asdict(FACTS) | {"name": "b/c"}}), "name of a host"),
        (_with_answer({"refused": "\x1b[2J", "facts": asdict(FACTS)}), "no host's"),
        (_with_answer({"refused": "versions", "facts": {"hetpipe": "9"}}), "refuses: versions"),
    ],
)
def test_an_impostor_that_listens_is_refused(
    answer: Callable[[socket.socket], None], words: str
) -> None:
    impostor = Impostor(answer)
    with pytest.raises(ClusterError, match=words):
        dial(impostor.address, RIGHT, own_facts("a"), Call(meeting.JOIN, door=1))
    impostor.close()


@pytest.mark.parametrize(
    "text",
    [b"[\"evil.example\", 1]", b"[\"127.0.0.1\", 70000]", b"[[], 1]", b"{}", b"\x80"],
)  # fmt: skip
def test_an_address_in_the_store_is_checked(text: bytes) -> None:
    with pytest.raises(ClusterError, match="no address of rank 0"):
        meeting._published(text)


def test_secrets_are_not_in_the_text_of_objects() -> None:
    for thing in (
        Outside(Wires(), RIGHT),
        StreamPort("crew/1", RIGHT, False, None, 0.0),
    ):
        assert SECRET not in repr(thing)


def test_no_process_shows_the_secret(room: Room) -> None:
    """Other users see the commands of processes."""
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(RIGHT in command for command in shown)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    write_secret(path)
    monkeypatch.setenv("HETPIPE_SECRET_FILE", str(path))
    return path


def test_a_secret_of_this_user_alone_is_read(file: Path, tmp_path: Path) -> None:
    assert len(find_secret(loopback=False)) == 64
    (tmp_path / "moved").symlink_to(file.rename(tmp_path / "true"))
    (tmp_path / "moved").rename(file)
    assert len(find_secret(loopback=False)) == 64


def _link_to_readable(file: Path) -> None:
    target = file.rename(file.with_name("target"))
    target.chmod(0o644)
    file.symlink_to(target)


def _make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_to_zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.chmod(0o640), "chmod 600"),
        (lambda file: file.chmod(0o602), "chmod 600"),
        (_link_to_readable, "chmod 600"),
        (lambda file: file.write_text(""), "has 0 characters.*hetpipe secret FILE"),
        (lambda file: file.write_text("too short\n"), "has 9 characters.*hetpipe secret FILE"),
        (lambda file: file.unlink(), "No such file.*hetpipe secret FILE"),
        (_make_folder, "hetpipe secret FILE"),
        (_make_pipe, "no file: .*hetpipe secret FILE"),
        (_link_to_zeros, "no file: .*hetpipe secret FILE"),
    ],
)
def test_a_spoiled_secret_is_refused_with_a_cure(
    file: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    spoil(file)
    with pytest.raises(ClusterError, match=words):
        find_secret(loopback=True)


@pytest.mark.parametrize("path", ["~nosuch/hetpipe.secret", "~nosuch"])
def test_a_secret_in_an_unknown_home_folder_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_SECRET_FILE", path)
    with pytest.raises(ClusterError, match="the home folder ~nosuch is unknown"):
        find_secret(loopback=True)


def test_a_secret_may_have_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = b"a secret of \xff and \xc3\xa4"
    monkeypatch.setitem(os.environb, b"HETPIPE_SECRET", secret)
    assert find_secret(loopback=False) == secret


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_secret_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    with pytest.raises(ClusterError, match="belongs to user 12345"):
        find_secret(loopback=False)
    with pytest.raises(ClusterError, match="belongs to user 12345"):
        _own_secret(file)


def test_a_made_up_secret_is_one_for_all_processes(tmp_path: Path) -> None:
    path, found = tmp_path / "secret", []
    threads = [threading.Thread(target=lambda: found.append(_own_secret(path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len({*found}) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_spoiled_made_up_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ClusterError, match="cannot be read"):
        _own_secret(path)
    path.unlink()
    path.touch(0o600)
    with pytest.raises(ClusterError, match="delete it"):
        _own_secret(path)


def test_a_disk_that_fills_leaves_no_draft_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ClusterError, match=r"secret cannot be written: No space left on device"):
        _own_secret(tmp_path / "secret")
    assert not [*tmp_path.iterdir()]
