"""How hosts find each other: by torchrun, at an address, or by dialing agents that stay."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

from hetpipe.environment import Ranks, torchrun_ranks
from hetpipe.errors import ClusterError
from hetpipe.hosts.door import Call, Door, Greeting, Visitor, dial
from hetpipe.hosts.facts import Facts, own_facts
from hetpipe.hosts.hosts import Gathering, Hosts, RemoteHost, dismiss
from hetpipe.hosts.secret import find_secret
from hetpipe.hosts.tls import HANDSHAKE_S, TlsStream
from hetpipe.hosts.wires import Wires
from hetpipe.words import choices, short

PORT = 29400
"""The port of a meeting whose address names none."""
KEY = "hetpipe/door"
"""The key of the controller's address in torchrun's store."""
FAILED = b"failed"
"""The controller's address if it has none."""
RETRY_S = 0.2
RETURN_S = 5.0
"""Seconds between two calls of a lost agent that stays."""

JOIN, CONTROL, WIRE = "join", "control", "wire"
"""Why a host calls: an agent calls its controller, a controller an agent that stays, a worker the
host of another worker."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the IP address and port of "HOST", "HOST:PORT" or "[IPV6]:PORT".

    Raises `ClusterError` for text that is no address, or a name that nothing resolves.
    """
    name, port = text, ""
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        name, _, port = text.partition(":")
    is_port = not port or (port.isdecimal() and len(port) <= 5 and int(port) <= 65535)
    if not name or not is_port:
        raise ClusterError(
            f"{short(text)} is no address; write HOST:PORT, for example 10.0.0.1:{PORT}"
        )
    return resolve(name), int(port or PORT)


def resolve(name: str) -> str:
    """Return the IP address of a host.

    Raises `ClusterError` for a name that nothing resolves, or that stands for the loopback here
    and thus for another machine elsewhere.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(f"no host {name!r}: {error.strerror}") from error
    except UnicodeError as error:
        raise ClusterError(
            f"{short(name)} cannot be the name of a host: between its dots are 1 to 63 characters"
        ) from error
    addresses = [str(each[4][0]) for each in found]
    outside = [address for address in addresses if not is_loopback(address)]
    if not outside and not _means_loopback(name):
        raise ClusterError(
            f"the name {name!r} stands for {addresses[0]} here, which no other machine can reach: "
            f"write the host's address in the network (ip address), under torchrun as --local-addr "
            "ADDRESS; for several hosts on this machine write 127.0.0.1"
        )
    return (outside or addresses)[0]


def _means_loopback(name: str) -> bool:
    """Return whether a name is an address, or one that means the loopback on every machine."""
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower().rpartition(".")[2] in ("localhost", "localdomain", "ip6-localhost")
    return True


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def gather_under_torchrun(ranks: Ranks, name: str, limit_s: float) -> Hosts:
    """As rank 0, publish an address in torchrun's store and wait for the other ranks."""
    store = _store(limit_s)

    def publish(door: Door) -> None:
        store.set(KEY, json.dumps(door.address))

    address = "127.0.0.1"
    try:
        if ranks.count > 1:
            address = resolve(ranks.master)
        return gather((address, 0), ranks.count, name, limit_s, publish)
    except ClusterError:
        store.set(KEY, FAILED)  # for ranks that still wait
        raise


def find_under_torchrun(ranks: Ranks, limit_s: float) -> tuple[str, int]:
    """As another rank, return the address of rank 0. Raises `ClusterError`."""
    _check_way(ranks)
    store = _store(limit_s)
    try:
        store.wait([KEY], timedelta(seconds=limit_s))
        text = store.get(KEY)
    except Exception as error:
        raise ClusterError(
            f"rank 0 has not called hp.Cluster.hosts() within {limit_s:.0f} s ({error})"
        ) from error
    if text == FAILED:
        raise ClusterError("rank 0 cannot meet other hosts; its own message has the reason")
    return _published(text)


def _published(text: bytes) -> tuple[str, int]:
    """Return the address in torchrun's store, where anybody may have written."""
    try:
        host, port = json.loads(text)
        if type(port) is int and 0 < port < 65536:
            return str(ip_address(host)), port
    except (ValueError, TypeError):
        pass
    raise ClusterError(f"torchrun's store has no address of rank 0, but {short(text)}")


def _check_way(ranks: Ranks) -> None:
    """Raise `ClusterError` if rank 0 is said to be on this machine, and is not."""
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not own_store or not is_loopback(resolve(ranks.master)):
        return
    try:
        socket.create_connection((ranks.master, ranks.port), HANDSHAKE_S).close()
    except OSError as error:
        raise ClusterError(f"nothing answers for rank 0 ({error}); {_no_way(ranks)}") from error


def _no_way(ranks: Ranks) -> str:
    return (
        f"torchrun says that rank 0 is at {ranks.master!r}, which is every machine's own loopback: "
        "for several machines start torchrun on each with --local-addr ADDRESS, its address in the "
        "network"
    )


def _store(limit_s: float) -> Any:
    """Return torchrun's store, with keys for this attempt alone. It holds only an address."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit_s))))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"{os.environ['TORCHELASTIC_RUN_ID']}/{attempt}", store)


def gather(
    address: tuple[str, int],
    count: int,
    name: str,
    limit_s: float,
    listening: Callable[[Door], Any] = lambda door: None,
    names: Sequence[str] = (),
) -> Hosts:
    """Listen on an address until the agents of `count` - 1 other hosts have called.

    `names` has the names of all hosts; without it any host may come. Afterwards a lost host may
    return with its name. Raises `ClusterError` if the address cannot be used, without a secret, or
    after `limit_s`.
    """
    facts, wires, gathering, known = own_facts(name), Wires(), Gathering(), [*names]
    if reason := _strange(facts.name, names):
        raise ClusterError(f"{reason}; give this host's name in the cluster")
    secret = find_secret(loopback=is_loopback(address[0]))

    def check(greeting: Greeting) -> str:
        if len(gathering.names) >= count - 1:
            return f"all {count} hosts have met already"
        if reason := _strange(greeting.facts.name, known):
            return reason
        if greeting.call.rank:
            return ""  # gets another name
        return _refusal(greeting.facts.name, [facts.name, *gathering.names])

    def visit(stream: TlsStream, greeting: Greeting) -> None:
        gathering.add(lambda names: _remote(stream, greeting, [facts.name, *names]))

    visitors = {JOIN: Visitor(check, visit), WIRE: wires.visitor}
    door = Door(address, secret, facts, visitors)
    try:
        listening(door)
        absent = [each for each in names if each != facts.name]
        others = gathering.wait(count - 1, limit_s, door, absent)
        known[:] = [facts.name, *gathering.names]
    except BaseException:
        door.close()
        dismiss(gathering.others, failed=True)
        raise
    return Hosts(facts, door, wires, secret, others)


def _strange(name: str, names: Sequence[str]) -> str:
    """Return why a host with this name may not come, or ""."""
    if not names or name in names:
        return ""
    return f"no host of this cluster is {name!r}; {choices(name, names)}"


def _refusal(name: str, names: Sequence[str]) -> str:
    """Return why a host with this name may not join the hosts with `names`, or ""."""
    same = [other for other in names if other.lower() == name.lower()]
    if not same:
        return ""
    return f"there is a host {same[0]!r} already: start the agent of {name!r} with another --name"


def _remote(stream: TlsStream, greeting: Greeting, names: Sequence[str]) -> RemoteHost:
    """Return the host that has called. `names` has the names of all other hosts."""
    call, facts = greeting
    while _refusal(facts.name, names):  # several ranks of torchrun on one machine
        facts = replace(facts, name=f"{facts.name}-{call.rank}")
    peer = stream.socket.getpeername()[0]
    return RemoteHost(stream, facts, (peer, call.door))


def reach(addresses: Sequence[tuple[str, int]], name: str, limit_s: float) -> Hosts:
    """Dial agents that stay. A lost one is dialed again and again, until it returns.

    Raises `ClusterError` if one is absent or busy.
    """
    secret = find_secret(loopback=all(is_loopback(host) for host, _ in addresses))
    facts, wires = own_facts(name), Wires()
    others: list[RemoteHost] = []
    with ExitStack() as undo:
        undo.callback(dismiss, others, failed=True)
        for address in addresses:
            stream, theirs = _dial(address, secret, facts, Call(CONTROL), limit_s)
            if reason := _refusal(theirs.name, [facts.name, *(other.name for other in others)]):
                stream.close()
                raise ClusterError(f"{address[0]} port {address[1]}: {reason}")
            others.append(RemoteHost(stream, theirs, address))
        door = Door((others[0].address, 0), secret, facts, {WIRE: wires.visitor})
        undo.callback(door.close)
        for other in others:
            door.listen_at(other.address)
        undo.pop_all()
    for other in others:
        _await_return(other, others, door, partial(dial, other.door, secret, facts, Call(CONTROL)))
    return Hosts(facts, door, wires, secret, others)


def _await_return(
    host: RemoteHost,
    others: list[RemoteHost],
    door: Door,
    dial_again: Callable[[], tuple[TlsStream, Facts]],
) -> None:
    """Once an agent that stays is lost, dial it until it is there again, or the door is closed."""

    def run() -> None:
        while not door.is_closed():
            time.sleep(RETURN_S)
            with suppress(OSError, ClusterError):
                stream, facts = dial_again()
                again = RemoteHost(stream, replace(facts, name=host.name), host.door)
                door.listen_at(again.address)
                _await_return(again, others, door, dial_again)
                others.append(again)
                if door.is_closed():
                    dismiss([again], failed=False)
                return

    host.on_lost = threading.Thread(target=run, name=f"hetpipe dial {host.name}", daemon=True).start


def call(
    address: tuple[str, int], secret: bytes, facts: Facts, wires: Wires, limit_s: float
) -> tuple[TlsStream, Facts, Door]:
    """As an agent, open a door for wires, and dial the controller until it answers.

    Under torchrun, the controller gives a second host of one name its rank as part of the name.
    Return the stream to the controller, its facts, and the door. Raises `ClusterError`.
    """
    here = _facing(address)
    door = Door((here, 0), secret, facts, {WIRE: wires.visitor})
    ranks = torchrun_ranks()
    join = Call(JOIN, door=door.address[1], rank=ranks.rank if ranks else 0)
    try:
        return (*_dial(address, secret, facts, join, limit_s), door)
    except BaseException:
        door.close()
        raise


def _facing(address: tuple[str, int]) -> str:
    """Return this host's address on the way to another one."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        with suppress(OSError):
            sock.connect(address)  # sends nothing
        return str(sock.getsockname()[0])


def _dial(
    address: tuple[str, int], secret: bytes, facts: Facts, call: Call, limit_s: float
) -> tuple[TlsStream, Facts]:
    """Dial again and again until the other host listens."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return dial(address, secret, facts, call)
        except OSError as error:
            if time.monotonic() > end_s:
                raise ClusterError(
                    f"nothing answers at {address[0]} port {address[1]} within {limit_s:.0f} s "
                    f"({error.strerror or error}); is the host there, and the port open?"
                ) from error
            time.sleep(RETRY_S)
