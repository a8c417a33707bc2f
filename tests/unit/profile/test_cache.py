"""Cost tables on disk: nothing is lost; a damaged table gives a warning and is made again."""

import json
import math
import os
import warnings

import pytest

from hetpipe.cost.table import (
    CostTable,
    DeviceCost,
    LayerBytes,
    LayerCost,
    LinkCost,
    TiedBytes,
)
from hetpipe.errors import CostError
from hetpipe.profile import cache
from hetpipe.profile.cache import CacheWarning

TABLE = CostTable(
    "toy",
    4,
    (LayerBytes("embed", 1, 2, 3, 4), LayerBytes("head", 5, 6, 7, 0)),
    {
        "a": DeviceCost((LayerCost(0.1, 0.2, 0.3), LayerCost(1 / 3, 2 / 3, 0.0)), 0.01, 99, "ram"),
        "b": DeviceCost(
            (LayerCost(math.inf, math.inf, 0.0, "no kernel"), LayerCost(1.0, 2.0, 3.0)),
            0.0, 98, "hbm", "async", "emulated",
        ),
    },
    {("a", "b"): LinkCost(0.1, math.inf, "modelled"), ("b", "a"): LinkCost(0.0, 1e9)},
    0.5,
    (TiedBytes("embed.weight", 16, (0, 1)),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    return tmp_path / "costs"


def test_a_table_survives_strict_json():
    text = json.dumps(TABLE.to_json(), allow_nan=False)
    assert CostTable.from_json(json.loads(text)) == TABLE


@pytest.mark.parametrize("key", [key for key in TABLE.to_json() if key != "version"])
def test_a_table_with_a_missing_or_unknown_key_is_refused(key):
    data = TABLE.to_json()
    data[f"{key}_"] = data.pop(key)
    with pytest.raises(CostError, match=f"the cost table lacks the key '{key}'"):
        CostTable.from_json(data)
    with pytest.raises(CostError, match="version None, this hetpipe reads 3"):
        CostTable.from_json({})


def test_load_returns_the_stored_table(folder):
    entry = cache.key({"model": "toy", "samples": 4})
    assert cache.load(entry) is None
    cache.store(entry, TABLE.to_json())
    assert CostTable.from_json(cache.load(entry)) == TABLE
    cache.store(entry, {"newer": 1})
    assert cache.load(entry) == {"newer": 1}
    assert os.listdir(folder) == [f"{entry}.json"]  # no other file remains


def test_keys_depend_on_every_part_but_not_on_their_order():
    parts = {"model": "f1", "driver": "535.1", "samples": 4, "cores": [0, 1]}
    assert cache.key(parts) == cache.key(dict(reversed(parts.items())))
    changed = [{**parts, name: "other"} for name in parts]
    assert len({cache.key(one) for one in [parts, *changed]}) == 1 + len(parts)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace("0.25", "0.26"),
        lambda text: text.replace("checksum", "checksun"),
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("{", "\x00"),
    ],
)
def test_a_damaged_entry_warns_and_is_made_again(folder, damage):
    entry = cache.key({"model": "toy"})
    cache.store(entry, {"seconds": 0.25})
    path = folder / f"{entry}.json"
    assert damage(path.read_text()) != path.read_text()
    path.write_text(damage(path.read_text()))
    with pytest.warns(CacheWarning, match="is not used and will be made again"):
        assert cache.load(entry) is None
    cache.store(entry, {"seconds": 0.25})
    assert cache.load(entry) == {"seconds": 0.25}


def test_bytes_that_are_no_text_are_damage_too(folder):
    entry = cache.key({})
    cache.store(entry, {})
    (folder / f"{entry}.json").write_bytes(b"\xff\xfe\xff")
    with pytest.warns(CacheWarning):
        assert cache.load(entry) is None


def test_a_store_that_fails_leaves_the_old_entry(folder, monkeypatch):
    cache.store("k", {"old": 1})

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left"):
        cache.store("k", {"new": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load("k") == {"old": 1}
    assert os.listdir(folder) == ["k.json"]


def test_without_the_variable_the_folder_is_the_users(monkeypatch):
    monkeypatch.delenv("HETPIPE_CACHE")
    assert cache.folder().parts[-2:] == ("hetpipe", "costs")
