"""Hints about unknown names."""

from __future__ import annotations

import pytest

from hetpipe.words import choices

MODELS = ("gpt", "gpt-untied", "vgg16", "vgg19", "vgg16-small", "resnet50", "lstm")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gtp", "did you mean gpt? "),
        ("GPT", "did you mean gpt or gpt-untied? "),
        ("VGG-16", "did you mean vgg16 or vgg19? "),
        ("my-lstm", "did you mean lstm? "),
        ("50", ""),
        ("", ""),
        ("x" * 10**6, ""),
        (None, ""),
    ],
)
def test_a_hint_begins_with_names_like_the_unknown_one(name: str | None, hint: str) -> None:
    known = "known: gpt, gpt-untied, vgg16, vgg19, vgg16-small, resnet50, lstm"
    assert choices(name, MODELS) == hint + known


def test_a_long_list_is_cut_and_an_empty_one_is_named() -> None:
    assert choices("d9998", [f"d{n}" for n in range(9999)]).startswith("did you mean d99, d9")
    assert choices("d9998", [f"d{n}" for n in range(9999)]).endswith("... 9999 in all")
    assert choices("a", []) == "known: none"
