"""Any damage to a file that people and programs write gives one error, of its kind, with a
place.

Of 20,000 damaged files some 400 once ended in a TypeError, KeyError, RecursionError and the
like.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from mutations import changed, dumped, spoilt

from hetpipe import checkpoint
from hetpipe.checkpoint.manifest import FormatError
from hetpipe.cluster.cluster import Cluster
from hetpipe.cost import read_costs
from hetpipe.errors import (
    CheckpointError,
    ClusterError,
    CostError,
    HetpipeError,
    PlanError,
    ScheduleError,
)
from hetpipe.plan import read_plan
from hetpipe.plan.planner import make_plan
from hetpipe.records import read_json
from hetpipe.schedule import fixed, generate, print_schedule
from hetpipe.simulate.timeline import Timeline

DATA = Path(__file__).parents[1] / "data"
COUNT = 200

CLUSTER = b"""\
transport = "shared-memory"

[[device]]
id = "slow"
device = "soft:cpu:0"
cores = [0]
speed = 0.5

[[device]]
device = "soft:board:7"

[[link]]
between = ["soft:board:7", "slow"]
bandwidth = "1 Gb/s"
latency = "1 ms"
"""


def document(name):
    return json.loads((DATA / name).read_text())


def damage(content, rng):
    """Return the content with a changed structure, or with its text damaged anywhere."""
    return dumped(changed(content, rng)) if rng.random() < 0.7 else spoilt(dumped(content), rng)


def refusal(read, error):
    """Return the message of the error that `read` raises, or None if it accepts the file."""
    try:
        read()
    except HetpipeError as refused:
        if type(refused) in error:
            return str(refused)
        raise
    return None


def check_all(path, make, read, errors, place):
    """Check that some files are accepted, and that each refusal begins with the file and names a
    place."""
    rng = random.Random(0)
    refusals = []
    for _ in range(COUNT):
        path.write_bytes(make(rng))
        message = refusal(lambda: read(path), errors)
        if message is not None:
            assert message.startswith(f"{path}:"), message
            assert re.search(place, message.removeprefix(str(path))), message
            refusals.append(message)
    assert COUNT / 2 < len(refusals) < COUNT


IN_JSON = (
    r"^:\d+: |^: (costs: )?[a-z_]+\.\d|^: (costs: )?[a-zA-Z_]+ (is|has)|devices\.numpy|files\."
    r"|the (plan|cost table|timeline|manifest) (lacks the key|has|is)|the key|the number [-0-9]+"
    r"|stages |cut_nbytes|microbatches|nested too deeply|(NaN|Infinity) is not JSON"
)


def test_plans(tmp_path):
    plan = document("plan.json") | {"costs": document("costs.json")}
    errors = (PlanError, CostError)
    check_all(tmp_path / "p.json", lambda rng: damage(plan, rng), read_plan, errors, IN_JSON)


def test_a_plan_can_be_shown_after_reading(tmp_path):
    rng, plan, shown = random.Random(1), document("plan.json"), 0
    for _ in range(COUNT):
        (tmp_path / "p.json").write_bytes(damage(plan, rng))
        if refusal(lambda: read_plan(tmp_path / "p.json"), (PlanError,)) is None:
            read = read_plan(tmp_path / "p.json")[0]
            shown += refusal(lambda read=read: str(read), (ScheduleError,)) is None
    assert shown > 3


def test_cost_tables(tmp_path):
    costs, errors = document("costs.json"), (CostError,)
    check_all(tmp_path / "c.json", lambda rng: damage(costs, rng), read_costs, errors, IN_JSON)


def test_a_planner_can_use_a_table_after_reading(tmp_path):
    rng, costs, planned = random.Random(1), document("costs.json"), 0
    for _ in range(COUNT):
        (tmp_path / "c.json").write_bytes(damage(costs, rng))
        if refusal(lambda: read_costs(tmp_path / "c.json"), (CostError,)) is None:
            table = read_costs(tmp_path / "c.json")
            numbers = {"mini_batch": 2 * table.samples, "microbatches": 2}
            plan = lambda: make_plan(table, list(table.devices), **numbers)  # noqa: B023, E731
            planned += refusal(plan, (PlanError, CostError)) is None
    assert planned > 3


def test_timelines(tmp_path):
    timeline, errors = document("timeline.json"), (ScheduleError,)
    check_all(
        tmp_path / "t.json",
        lambda rng: damage(timeline, rng),
        lambda path: Timeline.from_json(read_json(path, ScheduleError), str(path)),
        errors,
        IN_JSON,
    )


def test_manifests_with_a_correct_checksum(tmp_path):
    shutil.copytree(DATA / "checkpoint", tmp_path / "checkpoint")
    content = document("checkpoint/manifest.json")
    del content["sha256"]

    def signed(rng):
        other = json.loads(dumped(changed(content, rng)).replace(b"9" * 5000, b"9" * 50))
        sha256 = hashlib.sha256(json.dumps(other).encode()).hexdigest()
        return json.dumps({"sha256": sha256, **other}, indent=1).encode()

    path = tmp_path / "checkpoint" / "manifest.json"
    rng, refused = random.Random(0), 0
    for _ in range(COUNT):
        path.write_bytes(signed(rng))
        message = refusal(lambda: checkpoint.load(path.parent), (CheckpointError, FormatError))
        if message is not None:
            assert message.startswith(str(path.parent)), message
            refused += 1
    assert 0 < refused < COUNT  # the manifest does not check the contents of the caller's values


def test_manifests(tmp_path):
    shutil.copytree(DATA / "checkpoint", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "manifest.json"
    raw, rng = path.read_bytes(), random.Random(0)
    for _ in range(COUNT):
        spoiled = spoilt(raw, rng)
        path.write_bytes(spoiled)
        message = refusal(lambda: checkpoint.load(path.parent), (CheckpointError, FormatError))
        assert (message is None) == (spoiled == raw)
        assert message is None or str(path) in message


def test_cluster_files(tmp_path, monkeypatch):
    monkeypatch.setattr("hetpipe.cluster.member.available_cores", lambda: (0, 1))
    check_all(
        tmp_path / "c.toml",
        lambda rng: spoilt(CLUSTER, rng),
        Cluster.load,
        (ClusterError,),
        r"^:\d+: ",
    )


def texts():
    """Return schedules as text: with everything a row may hold, with lanes, and with passes
    only."""
    whole = print_schedule(generate("1f1b", 3, 4, tied=[(0, [2])]))
    lanes = print_schedule(generate("fbp", 2, 2))
    return [whole.encode(), lanes.encode(), b"0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1  # passes\n"]


def test_schedules(tmp_path, monkeypatch):
    rows = texts()
    monkeypatch.setattr(fixed, "register_schedule", lambda *args, **traits: lambda rows: rows)
    check_all(
        tmp_path / "damaged.txt",
        lambda rng: spoilt(rng.choice(rows), rng),
        fixed.register_file,
        (ScheduleError,),
        r":\d+: |line \d+: |\d+[A-Z]{1,2}\d*|stages are \[",
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F999999999 0B0", r"0F999999999 is of micro-batch 999999999, .* enough for 1 micro-b"),
        ("0F99999999999", "its number is '99999999999', above 999999999"),
        ("99999F0", "line 1: '99999F0': its stage is '99999', above 9999"),
        ("9999F0", "9999F0 is of stage 9999, but there are 1 forwards"),
        ("0F" + "9" * 5000, r"its number is '9+\.\.\.9+', above 999999999"),
        ("0SF0", "line 1: no pass"),
    ],
)
def test_excessive_numbers_are_refused_at_once(text, match):
    with pytest.raises(ScheduleError, match=match):
        fixed.register_text("damaged", text)
