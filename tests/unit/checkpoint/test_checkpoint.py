"""Checkpoints: loading returns the saved values, damage is refused, and a kill keeps the last
checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from hetpipe import checkpoint
from hetpipe.checkpoint import durable
from hetpipe.checkpoint.checkpoint import INDEX
from hetpipe.checkpoint.tensors import Outline, Tensors
from hetpipe.errors import CheckpointError

ROLES = ("param", "buffer", "state")
FILES = len(ROLES) + 2
"""The number of files in a folder: the manifest and the index as well."""


def arrays(step):
    """Return the tensors of a small training; each tensor's values tell the step."""
    return {
        "param": {"a.weight": np.full((3, 4), step, "float32"), "a.bias": np.full(3, step, "f4")},
        "buffer": {"norm.count": np.array(step)},
        "state": {"momentum/a.weight": np.full((3, 4), -step, "float32")},
    }


def save(directory, step):
    checkpoint.save(directory, arrays(step), {"step": step, "lr": step / 8})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for role in expected:
        assert found[role].keys() == expected[role].keys()
        for name, array in expected[role].items():
            there = found[role][name]
            assert (there.dtype, there.shape) == (array.dtype.newbyteorder("="), array.shape)
            assert np.array_equal(there, array)
            assert there.flags.writeable


def assert_holds(directory, step):
    """Assert that the folder holds the whole checkpoint of that step and nothing else."""
    found = checkpoint.load(directory)
    assert found.manifest == {"step": step, "lr": step / 8}
    assert_same(found.tensors, arrays(step))
    assert len(os.listdir(directory)) == FILES


def files(directory):
    """Return each file's path by its role, and the manifest's by its name."""
    paths = directory.iterdir()
    return {path.name.split("-")[0]: path for path in paths if path.name != INDEX}


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 7)
    return tmp_path


def test_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((4, 6))
    tensors = {
        "param": {
            "float32": wide.astype("float32"),
            "float64": np.array([np.nan, np.inf, -0.0, 5e-324]),
            "float16": wide.astype("float16"),
            "scalar": np.array(2.5, "float32"),
            "empty": np.zeros((0, 3), "float32"),
            "transposed": wide.T,
            "strided": wide[::2, ::3],
            "reversed": wide[::-1],
            "big-endian": wide.astype(">f8"),
            "name / with \u00fcmlaut and spaces": np.ones(1, "float32"),
        },
        "buffer": {
            "bool": np.array([[True, False, True]]),
            "int64": np.array([-(2**63), 2**63 - 1]),
            "int32": np.arange(3, dtype="int32"),
            "int16": np.arange(-3, 4, dtype="int16"),
            "int8": np.arange(-3, 4, dtype="int8"),
            "uint8": np.arange(250, 256, dtype="uint8"),
        },
        "state": {},
    }
    tensors["param"]["float64"].view("int64")[0] += 1  # a NaN with other bits
    manifest = {"step": 0, "epoch": 1.25, "order": [3, None, True], "rng": {"seed": 2**70}, "": ""}
    checkpoint.save(tmp_path / "new" / "folder", tensors, manifest)
    found = checkpoint.load(tmp_path / "new" / "folder")
    assert found.manifest == manifest
    there = {role: dict(named) for role, named in found.tensors.items()}
    bits = [tree["param"].pop("float64").tobytes() for tree in (tensors, there)]
    assert bits[0] == bits[1]
    assert_same(there, tensors)


def test_only_given_roles_have_files(tmp_path):
    checkpoint.save(tmp_path, {"param": {"w": np.ones(2)}}, {"step": 3})
    assert sorted(files(tmp_path)) == ["manifest.json", "param"]
    assert checkpoint.load(tmp_path).tensors.keys() == {"param"}


def test_the_index_names_the_file_of_each_tensor_of_the_model(saved):
    index = json.loads((saved / INDEX).read_text())
    paths = files(saved)
    assert index["weight_map"] == {
        "a.weight": paths["param"].name, "a.bias": paths["param"].name,
        "norm.count": paths["buffer"].name,
    }  # fmt: skip
    nbytes = [a.nbytes for role in ("param", "buffer") for a in arrays(7)[role].values()]
    assert index["metadata"] == {"total_size": sum(nbytes)}
    for name, file in index["weight_map"].items():
        with safe_open(saved / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {"w": "model-00001-of-00002.st"}}'])
def test_the_index_of_another_program_stays(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="is of another program, and a checkpoint would"):
        save(tmp_path, 7)
    assert (tmp_path / INDEX).read_text() == text


def test_a_folder_may_be_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.save("~/run", {"param": {"w": np.ones(2)}}, {"step": 3})
    assert checkpoint.load(str(tmp_path / "run")).manifest == {"step": 3}
    with pytest.raises(CheckpointError, match="no file can have the path"):
        checkpoint.load("")


def test_files_are_plain_safetensors_with_aligned_elements(tmp_path):
    odd = {"bytes": np.ones(3, "int8"), "wide": np.ones(2), "half": np.ones(5, "float16")}
    checkpoint.save(tmp_path, {"param": odd}, {"step": 3})
    raw = files(tmp_path)["param"].read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        assert (start + entry["data_offsets"][0]) % odd[name].itemsize == 0
    with safe_open(files(tmp_path)["param"], "np") as opened:
        assert sorted(opened.keys()) == sorted(odd)


def test_the_manifest_describes_the_files(saved):
    document = json.loads((saved / "manifest.json").read_text())
    assert (document["version"], document["step"], document["values"]) == (2, 7, {"lr": 7 / 8})
    for role, tensors in arrays(7).items():
        path = files(saved)[role]
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.name == f"{role}-00000007-{sha256[:16]}.safetensors"
        entry = {"name": path.name, "nbytes": path.stat().st_size, "sha256": sha256}
        assert document["files"][role] == [{**entry, "tensors": len(tensors)}]


def test_saving_again_removes_the_old_files_and_no_others(saved):
    others = ["notes.txt", "model.safetensors", "param-1.safetensors", ".hidden"]
    for name in others:
        (saved / name).write_text("mine")
    save(saved, 8)
    for name in others:
        assert (saved / name).read_text() == "mine"
        (saved / name).unlink()
    assert_holds(saved, 8)


def test_tensors_can_be_read_after_the_next_save(saved):
    found = checkpoint.load(saved)
    save(saved, 8)
    assert_same(found.tensors, arrays(7))


def test_a_file_that_becomes_shorter_while_it_is_open_is_an_error(saved):
    """A map of the file would end the process."""
    found = checkpoint.load(saved)
    os.truncate(files(saved)["param"], 64)
    with pytest.raises(CheckpointError, match=r"cannot read .*param-.*shorter; copy"):
        found.tensors["param"].arrays()


def test_a_step_can_be_saved_twice(saved):
    save(saved, 7)
    assert_holds(saved, 7)
    other = {**arrays(7), "buffer": {"norm.count": np.array(70)}}
    checkpoint.save(saved, other, {"step": 7})
    assert_same(checkpoint.load(saved).tensors, other)
    assert len(os.listdir(saved)) == FILES


def test_saving_again_heals_a_damaged_file(saved):
    files(saved)["param"].write_bytes(b"")
    save(saved, 7)
    assert_holds(saved, 7)


def test_an_older_step_can_follow(saved):
    save(saved, 6)
    assert_holds(saved, 6)


# Damage.


def assert_refused(directory, path, match=None):
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.load(directory)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("role", [*ROLES, "manifest.json"])
def test_a_missing_file_is_named(saved, role):
    path = files(saved)[role]
    path.unlink()
    assert_refused(saved, path, "is missing; ")


@pytest.mark.parametrize("role", [*ROLES, "manifest.json"])
def test_a_truncated_file_is_named(saved, role):
    path = files(saved)[role]
    raw = path.read_bytes()
    for length in (len(raw) - 1, len(raw) // 2, 1, 0):
        path.write_bytes(raw[:length])
        assert_refused(saved, path)
    path.write_bytes(raw + b"\n")
    assert_refused(saved, path)


def test_the_error_of_a_truncated_file_names_both_sizes(saved):
    path = files(saved)["param"]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    sizes = f"has {len(raw) - 1} bytes, not the {len(raw)} saved; copy the checkpoint again"
    assert_refused(saved, path, sizes)


@pytest.mark.parametrize("role", [*ROLES, "manifest.json"])
def test_every_altered_byte_is_noticed(saved, role):
    path = files(saved)[role]
    raw = path.read_bytes()
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert_refused(saved, path)
    path.write_bytes(raw)
    assert_holds(saved, 7)


@pytest.mark.parametrize("raw", [b"", b"7", b"null", b"\xff\xfe", b"{}", b"[" * 100_000])
def test_an_invalid_manifest_is_refused(saved, raw):
    (saved / "manifest.json").write_bytes(raw)
    assert_refused(saved, saved / "manifest.json")


def test_a_folder_instead_of_a_file_is_refused(saved):
    path = files(saved)["param"]
    path.unlink()
    path.mkdir()
    assert_refused(saved, path)
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").mkdir()
    assert_refused(saved, saved / "manifest.json", "cannot read")


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_no_checkpoint(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / name, tmp_path / name, "give the folder that a checkpoint was saved")


# Manifests with a correct checksum that this version would not have written.


def rewrite(directory, change):
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    change(document)
    sha256 = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": sha256, **document}, indent=1))


def test_an_unchanged_rewrite_is_accepted(saved):
    rewrite(saved, lambda document: None)
    assert_holds(saved, 7)


@pytest.mark.parametrize("version", [None, 0, 3, "1", True])
def test_another_version_is_refused(saved, version):
    rewrite(saved, lambda document: document.update(version=version, hetpipe="9.9", more=1))
    assert_refused(saved, saved, "this hetpipe reads 1 and 2; load it with hetpipe 9.9")


def with_role(role, entry):
    return {**entry, "name": entry["name"].replace("param", role)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.update(colour=1), "unknown key 'colour'; known: hetpipe, step, values"),
        (lambda d: d["files"]["param"][0].update(colour=1), r"files\.param\.0 has an unknown key"),
        (lambda d: d.pop("values"), "lacks the key 'values'"),
        (lambda d: d["files"]["state"][0].pop("sha256"), r"files\.state\.0 lacks the key 'sha256'"),
        (lambda d: d.update(step="7"), "step is '7', it should be a whole number"),
        (lambda d: d.update(files=[]), r"files is \[\], it should be an object"),
        (lambda d: d["files"].update(param=3), r"files\.param is 3, it should be a list"),
        (
            lambda d: d["files"].update(grad=[with_role("grad", d["files"]["param"][0])]),
            r"files\.grad is no role; the roles are param",
        ),
        (lambda d: d["files"]["param"][0].update(name="../x"), "'../x', not 'param-00000007-"),
        (lambda d: d["files"]["param"][0].update(tensors=3), "has 2 tensors, not 3"),
    ],
)
def test_a_foreign_manifest_is_refused(saved, change, match):
    rewrite(saved, change)
    assert_refused(saved, saved, match)


@pytest.mark.parametrize(
    "raw", [b"", b"not safetensors", b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F8_E4M3","shape":[1],'
            b'"data_offsets":[0,1]}}           \0']
)  # fmt: skip
def test_a_foreign_file_is_refused(saved, raw):
    sha256 = hashlib.sha256(raw).hexdigest()
    name = f"param-00000007-{sha256[:16]}.safetensors"
    (saved / name).write_bytes(raw)
    entry = {"name": name, "nbytes": len(raw), "sha256": sha256, "tensors": 1}
    rewrite(saved, lambda document: document["files"].update(param=[entry]))
    assert_refused(saved, saved / name, "is no safetensors file")


# Values that cannot be stored: `save` refuses them before it writes anything.


def circle():
    ring = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), [float("inf")], (1, 2), {1: 2}, {"a": (1,)}, {1, 2}, b"bytes", np.int64(3),
        np.ones(2), Path("x"), object(), circle(), 1j,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_manifest_holds_json_values_only(saved, value):
    with pytest.raises(CheckpointError, match=r"manifest's 'extra' is .*, which JSON would change"):
        checkpoint.save(saved, arrays(8), {"step": 8, "extra": value})
    assert_holds(saved, 7)


def test_keys_of_the_manifest_are_strings(saved):
    with pytest.raises(CheckpointError, match="the manifest's 3 is 4"):
        checkpoint.save(saved, arrays(8), {"step": 8, 3: 4})
    assert_holds(saved, 7)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_must_be_a_count(saved, step):
    with pytest.raises(CheckpointError, match="give the number of steps done"):
        checkpoint.save(saved, arrays(8), {"step": step})
    assert_holds(saved, 7)


def test_a_manifest_too_deep_for_the_stack(saved):
    """Start far too deep and go up to the first depth that `save` accepts; it loads again."""
    deep = 1
    for _ in range(sys.getrecursionlimit() + 100):
        deep = [deep]
    messages = set()
    while True:
        try:
            checkpoint.save(saved, arrays(8), {"step": 8, "deep": deep})
        except CheckpointError as error:
            messages.add(str(error))
            assert len(os.listdir(saved)) == FILES
            deep = deep[0]
        else:
            break
    assert checkpoint.load(saved).manifest == {"step": 8, "deep": deep}
    assert "the manifest is nested too deeply; make it flatter" in messages


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"grad": {}}, "unknown role 'grad'; a checkpoint has param, buffer, state"),
        ({"param": {"w": np.ones(2, "complex64")}}, "param 'w' is of type complex64, .*; use one"),
        ({"state": {"w": np.array([None])}}, "state 'w' is of type object"),
        ({"param": {"__metadata__": np.ones(2)}}, "safetensors reserves the name '__metadata__'"),
    ],
)
def test_tensors_that_cannot_be_stored(saved, tensors, match):
    with pytest.raises(CheckpointError, match=match):
        checkpoint.save(saved, tensors, {"step": 8})
    assert_holds(saved, 7)


# Folders without write access, and full disks.


@pytest.fixture
def powerless():
    """Run the test without root's rights, since root can write to every folder."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("this root cannot become another user")
    yield
    os.seteuid(0)


def test_a_read_only_folder(saved, monkeypatch, request):
    monkeypatch.chdir(saved)  # another user may lack access to the parent folders
    for path in saved.iterdir():
        path.chmod(0o444)
    saved.chmod(0o555)
    request.getfixturevalue("powerless")
    with pytest.raises(CheckpointError, match=r"cannot save .* Permission denied: .*write access"):
        save(Path(), 8)
    with pytest.raises(CheckpointError, match="cannot save a checkpoint in new/folder"):
        save(Path("new/folder"), 8)
    assert_holds(Path(), 7)


def test_a_file_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="choose another folder"):
        save(tmp_path / "file", 8)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_save_on_a_full_disk_leaves_nothing(saved):
    """A limit on the size of files imitates a full disk: the manifest no longer fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    left = []
    try:
        for step in (8, 9):
            with pytest.raises(CheckpointError, match=r"File too large.*make room"):
                save(saved, step)
            left.append(len(os.listdir(saved)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.load(saved).manifest["step"] == 7
    assert left == [FILES, FILES]  # no file of the failed saves
    save(saved, 9)
    assert_holds(saved, 9)


def test_a_first_save_on_a_full_disk_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_first_save_leaves_no_folder(tmp_path):
    def refuse(names):
        raise CheckpointError("no such value")

    (tmp_path / "kept").mkdir()
    tensors = {"param": Tensors({"w": Outline((2,), np.dtype("f4"))}, refuse)}
    for folder in (tmp_path / "kept", tmp_path / "new" / "folder"):
        with pytest.raises(CheckpointError, match="no such value"):
            checkpoint.save(folder, tensors, {"step": 1})
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert not os.listdir(tmp_path / "kept")


def test_an_interrupted_save_leaves_nothing(saved, monkeypatch):
    def interrupt(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(saved, 8)
    assert_holds(saved, 7)


def test_a_failure_after_the_manifest_keeps_the_new_checkpoint(saved, monkeypatch):
    """The last sync of the folder fails after the manifest has its final name."""
    replace = os.replace

    def replaced(source, target):
        replace(source, target)
        if target.name == "manifest.json":
            monkeypatch.setattr(os, "fsync", broken)

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(saved, 8)
    assert_holds(saved, 8)


def test_a_planted_link_is_not_written_through(saved):
    (saved / "victim").write_text("precious")
    (saved / ".manifest.partial").symlink_to("victim")
    (saved / ".param.partial").symlink_to("victim")
    save(saved, 8)
    assert (saved / "victim").read_text() == "precious"
    (saved / "victim").unlink()
    assert_holds(saved, 8)


# Several processes.


def test_concurrent_saves_into_one_folder_destroy_nothing(tmp_path):
    """Each save is whole or refused, and so is each load meanwhile."""
    save_large(tmp_path, 1)
    children = []
    for first in (1000, 2000, 3000):
        child = os.fork()
        if child == 0:
            refused = done = 0
            try:
                for step in range(first, first + 40):
                    try:
                        save_large(tmp_path, step)
                        done += 1
                    except CheckpointError as error:
                        if "another process or thread is saving" not in str(error):
                            raise
                        refused += 1
                    found = checkpoint.load(tmp_path)
                    values = {float(named["w"].min()) for named in found.tensors.values()}
                    assert values == {found.manifest["step"]}
                os._exit(10 + (done > 0) + 2 * (refused > 0))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        children.append(child)
    codes = [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children]
    assert all(code in (11, 12, 13) for code in codes), codes
    assert any(code != 12 for code in codes), "nobody has saved"
    last = checkpoint.load(tmp_path)
    assert last.manifest["step"] >= 1000
    assert len(os.listdir(tmp_path)) == FILES


def test_a_save_is_refused_during_another_save(saved):
    with durable.locked(saved), pytest.raises(CheckpointError) as refused:
        save(saved, 8)
    assert str(refused.value).startswith(f"{saved}: another process or thread is saving")
    assert_holds(saved, 7)
    save(saved, 8)
    assert_holds(saved, 8)


# Kills.

TOUCH = {"open", "mkdir", "write", "flush", "fsync", "close", "__exit__", "replace", "unlink"}
"""C functions through which a save touches the disk."""


def save_until(directory, step, stop):
    """Save in another process, which a signal kills around its stop-th access to the disk.

    Return whether it was killed.
    """
    child = os.fork()
    if child == 0:
        events = 0

        def kill(frame, event, function):
            nonlocal events
            if event == "c_return" and function.__name__ in TOUCH:
                if events == stop:
                    os.kill(os.getpid(), signal.SIGKILL)
                events += 1

        sys.setprofile(kill)
        save(directory, step)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path):
    steps = []
    while True:
        directory = tmp_path / str(len(steps))
        save(directory, 1)
        if not save_until(directory, 2, stop=len(steps)):
            break
        found = checkpoint.load(directory)
        steps.append(found.manifest["step"])
        assert_same(found.tensors, arrays(steps[-1]))
        save(directory, 3)
        assert_holds(directory, 3)
    assert_holds(directory, 2)
    kept = steps.count(1)
    assert steps == [1] * kept + [2] * (len(steps) - kept)
    assert kept >= 10
    assert len(steps) - kept >= 3


@pytest.mark.slow
def test_a_first_save_killed_anywhere_is_whole_or_absent(tmp_path):
    outcomes = []
    while save_until(directory := tmp_path / str(len(outcomes)) / "new", 2, stop=len(outcomes)):
        outcomes.append((directory / "manifest.json").exists())
        if outcomes[-1]:
            assert_same(checkpoint.load(directory).tensors, arrays(2))
        else:
            with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
                checkpoint.load(directory)
        save(directory, 3)
        assert_holds(directory, 3)
    assert outcomes == sorted(outcomes)
    assert len(set(outcomes)) == 2


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_save(tmp_path):
    rng = random.Random(0)
    reached = 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            step = reached
            while True:
                step += 1
                save_large(tmp_path, step)
                os.write(writer, b"%9d" % step)
        os.close(writer)
        with open(reader, "rb") as told:
            finished = int(told.read(9))
            time.sleep(rng.uniform(0, 0.04))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            finished = int(told.read()[-9:] or finished)
        found = checkpoint.load(tmp_path)
        reached = found.manifest["step"]
        assert reached in (finished, finished + 1)
        values = {role: np.unique(named["w"]) for role, named in found.tensors.items()}
        assert values == {role: [reached] for role in ROLES}


def save_large(directory, step):
    large = np.full(50_000, step, "float32")
    checkpoint.save(directory, {role: {"w": large} for role in ROLES}, {"step": step})


def test_files_are_synced_before_the_manifest_names_them(saved, monkeypatch):
    """A power loss undoes writes and renames that were not synced."""
    seen = []
    replace, fsync = os.replace, os.fsync

    def recorded_fsync(descriptor):
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def recorded_replace(source, target):
        seen.append(f"rename {source.name} {target.name.split('-')[0]}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    monkeypatch.setattr(Path, "unlink", lambda path: seen.append("remove"))
    save(saved / "new" / "folder", 7)
    assert seen[:2] == [f"sync {saved.name}", "sync new"]
    seen.clear()
    save(saved, 8)
    roles = [[f"sync .{role}.partial", f"rename .{role}.partial {role}"] for role in ROLES]
    assert seen == [
        *(event for role in roles for event in role),
        "sync .index.partial",
        f"sync {saved.name}",
        "sync .manifest.partial",
        "rename .manifest.partial manifest.json",
        f"rename .index.partial {INDEX}",
        f"sync {saved.name}",
        *["remove"] * 3,
    ]
