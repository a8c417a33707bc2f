"""Addresses of meetings: names that stand for the loopback, and torchrun's address of rank 0."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hetpipe.environment import Ranks
from hetpipe.errors import ClusterError
from hetpipe.hosts import meeting


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses that every name resolves to."""
    addresses: list[str] = []

    def resolve(name: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return addresses


def test_a_name_that_stands_for_the_loopback_is_refused_with_a_cure(found: list[str]) -> None:
    found += ["127.0.1.1"]
    with pytest.raises(ClusterError, match=r"'a' stands for 127\.0\.1\.1 here.*--local-addr"):
        meeting.parse_address("a:29400")
    assert meeting.resolve("localhost") == "127.0.1.1"
    found += ["10.0.0.1"]
    assert meeting.parse_address("a:29400") == ("10.0.0.1", 29400)


def test_addresses_of_both_families_are_read() -> None:
    assert meeting.parse_address("[fd00::1]:29400") == ("fd00::1", 29400)
    assert meeting.parse_address("fd00::1") == ("fd00::1", meeting.PORT)
    assert meeting.parse_address("::1") == ("::1", meeting.PORT)
    assert meeting.parse_address("127.0.0.1") == ("127.0.0.1", meeting.PORT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0..1:29400", r"'10\.0\.0\.\.1' cannot be the name"),
        (".lab:29400", "'.lab' cannot be the name"),
        ("a" * 70, "cannot be the name of a host: .* 1 to 63 characters"),
        ("a\0b:29400", "no host"),
        ("10.0.0.1:65536", "is no address; write HOST:PORT"),
        ("10.0.0.1:" + "9" * 5000, "is no address; write HOST:PORT"),
        ("10.0.0.1:x", "is no address; write HOST:PORT"),
        (":29400", "is no address; write HOST:PORT"),
    ],
)
def test_text_that_is_no_address_is_refused(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words) as refused:
        meeting.parse_address(text)
    assert len(str(refused.value)) < 200


def test_a_rank_0_that_is_said_to_be_here_and_is_not_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterError, match="start torchrun on each with --local-addr"):
        meeting.find_under_torchrun(Ranks(1, 2, "127.0.0.1", port), 60.0)
