"""Groups of samples of like length, and sizes with a length as keys."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hetpipe as hp
from hetpipe.buckets import Size, like
from hetpipe.errors import HetpipeError
from hetpipe.loop.chance import loader_states, set_loader

LENGTHS = torch.randint(1, 33, (101,), generator=torch.Generator().manual_seed(0)).tolist()


def bucket_of(length: int) -> int:
    return next(bucket for bucket in (8, 16, 32) if bucket >= length)


def test_every_sample_comes_once_beside_samples_of_like_length() -> None:
    batches = hp.BucketBatches(LENGTHS, [16, 8, 32], 4, seed=3)
    first, second = list(batches), list(batches)
    for epoch in (first, second):
        assert sorted(index for each in epoch for index in each) == list(range(len(LENGTHS)))
        assert len(epoch) == len(batches) == 26
        assert [len(each) for each in epoch] == [4] * 25 + [1]
        mixed = [each for each in epoch if len({bucket_of(LENGTHS[n]) for n in each}) > 1]
        assert len(mixed) <= 2  # the rest of a bucket goes to the next one
    assert first != second
    again = hp.BucketBatches(LENGTHS, [8, 16, 32], 4, seed=3)
    assert list(again) == first
    assert list(again) == second
    assert list(hp.BucketBatches(LENGTHS, [8, 16, 32], 4, seed=4)) != first


def test_a_loader_of_batches_continues_where_its_state_was_saved() -> None:
    loader = DataLoader(
        LENGTHS, batch_sampler=hp.BucketBatches(LENGTHS, [8, 16, 32], 4), collate_fn=list
    )  # type: ignore[arg-type]
    list(loader)
    states = loader_states(loader)
    right = list(loader)
    other = DataLoader(
        LENGTHS, batch_sampler=hp.BucketBatches(LENGTHS, [8, 16, 32], 4, seed=1), collate_fn=list
    )  # type: ignore[arg-type]
    set_loader(other, states)
    assert list(other) == right


def test_the_last_small_batch_may_be_dropped() -> None:
    batches = hp.BucketBatches(LENGTHS, [8, 16, 32], 4, drop_last=True)
    assert [len(each) for each in batches] == [4] * len(batches) == [4] * 25


def test_a_data_loader_takes_the_batches() -> None:
    texts = [torch.full((length,), length) for length in LENGTHS]
    batches = hp.BucketBatches(LENGTHS, hp.Buckets([8, 16, 32]), 4)
    loader = DataLoader(texts, batch_sampler=batches, collate_fn=list)  # type: ignore[arg-type]
    assert sorted(len(text) for group in loader for text in group) == sorted(LENGTHS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 40], [8, 32], 4), "sample 1: length 40 is above the largest bucket, 32"),
        (([3], [8, 32], 0), "batch_size=0: give a whole number"),
        (([3], [], 4), r"buckets=\[\]: give a list of lengths"),
        (([3], "64", 4), "buckets='64': give a list"),
        (([3], [8, 8], 4), r"buckets=\[8, 8\]: give each length once"),
        (([3], [8, True], 4), "a bucket has length True"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        hp.BucketBatches(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0: give the number of one dimension, 1 or more"),
        ({"dim": {}}, "name a tensor whose length varies"),
        ({"dim": {"y": True}}, "dim=True for y"),
        ({"pad": 0}, "pad=0: give a dict"),
    ],
)
def test_wrong_buckets_are_refused(options: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        hp.Buckets([8], **options)


def test_sizes_are_keys_and_numbers() -> None:
    size = Size(4, 64)
    assert size != 4
    assert 4 != size  # noqa: SIM300 - the order decides which method compares
    assert size == Size(4, 64) != Size(4, 128)
    assert {size: "a", 4: "b", Size(4, 128): "c"}[pickle.loads(pickle.dumps(size))] == "a"
    assert size + 1 == 5
    assert like(2, size) == Size(2, 64)
    assert like(2, 4) == 2
    assert repr(size) == "Size(4, 64)"
    assert f"{size}" == "4 (length 64)"
