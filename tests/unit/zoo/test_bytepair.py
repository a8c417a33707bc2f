"""Byte-pair coding: by hand, encoding and decoding, and determinism."""

from __future__ import annotations

import pytest

from hetpipe.errors import HetpipeError
from hetpipe.zoo.text import BYTES, BytePairs, learn

TEXT = b"a rose is a rose is a rose, and there is no other rose"


def test_by_hand() -> None:
    """The most frequent pair is `ab`, four times, then `abc`, three times."""
    pairs = learn(b"abcabcabc ab", BYTES + 2)
    assert pairs.merges == ((ord("a"), ord("b")), (256, ord("c")))
    assert pairs.encode(b"abcabx").tolist() == [257, 256, ord("x")]
    assert pairs.decode(pairs.encode(b"abcabx")) == b"abcabx"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [(b"aa", [256]), (b"aaa", [256, 97]), (b"aaaaabaa", [256, 256, 97, 98, 256])],
)
def test_a_run_of_one_letter_is_merged_from_the_left(text: bytes, tokens: list[int]) -> None:
    assert BytePairs(((97, 97),)).encode(text).tolist() == tokens


def test_letters_decide_between_equally_frequent_pairs() -> None:
    assert learn(b"cd ab", BYTES + 1).merges == ((ord(" "), ord("a")),)


@pytest.mark.parametrize("text", [TEXT, b"", b"x", bytes(range(256)), "Straße, naïve".encode()])
def test_decoding_reverses_encoding(text: bytes) -> None:
    pairs = learn(TEXT, BYTES + 20)
    assert pairs.decode(pairs.encode(text)) == text


def test_the_learnt_text_becomes_short() -> None:
    pairs = learn(TEXT, BYTES + 20)
    assert pairs.size == BYTES + 20
    assert len(pairs.encode(TEXT)) < len(TEXT) / 2


def test_the_same_text_gives_the_same_pairs() -> None:
    assert learn(TEXT, BYTES + 20) == learn(TEXT, BYTES + 20)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(HetpipeError, match="3 bytes of text teach 258 tokens, not 300"):
        learn(b"abc", 300)
