"""The validator on hand-written faults, and compared with an independent check on mutations."""

import itertools
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule import validate as validator
from hetpipe.schedule.action import Action
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.tables import is_valid
from hetpipe.schedule.validate import validate


def draw(*rows):
    """Return a schedule from rows of text; blanks only draw the staircase."""
    return tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)


VALID = draw(
    "0F0 0SF0 0F1 0SF1                    0RB0 0B0          0RB1 0B1 0U",
    "         1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1                     1U",
)


def test_the_drawn_schedule_is_valid():
    validate(VALID, 2)
    validate(VALID, 2, in_flight=[2, 1])


def refusal(schedule, microbatches=2, in_flight=None):
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, microbatches, in_flight)
    return str(caught.value)


def test_a_missing_action_is_marked_at_the_end_of_its_row():
    broken = draw("0F0 0SF0 0RB0 0B0 0U", "1RF0 1F0 1SB0 1U")
    assert refusal(broken, 1) == (
        "1B0 is missing\nworker 0: 0F0 0SF0 0RB0 0B0 0U\nworker 1: 1RF0 1F0 1SB0 1U [?]"
    )


def test_a_backward_before_its_forward_is_refused():
    broken = draw("0F0 0SF0 0RB0 0B0 0U", "1RF0 1B0 1F0 1SB0 1U")
    assert refusal(broken, 1) == (
        "1B0 comes before 1F0, which it needs\n"
        "worker 0: 0F0 0SF0 0RB0 0B0 0U\n"
        "worker 1: 1RF0 [1B0] 1F0 1SB0 1U"
    )


def test_a_repeated_forward_is_refused():
    broken = draw("0F0 0SF0 0F0 0RB0 0B0 0U", "1RF0 1F0 1B0 1SB0 1U")
    assert "0F0 occurs twice" in refusal(broken, 1)
    assert "0F0 0SF0 [0F0] 0RB0" in refusal(broken, 1)


def test_an_unknown_microbatch_is_refused():
    assert "0F1 has no place among 2 stages, 1 micro-batches" in refusal(VALID, 1)


def test_receives_must_follow_the_order_of_sends():
    broken = draw(
        "0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0U",
        "1RF1 1F1 1RF0 1F0 1B0 1SB0 1B1 1SB1 1U",
    )
    assert "1RF1 receives from stage 0, which sends F0 at that turn" in refusal(broken)
    assert "worker 1: [1RF1] 1F1" in refusal(broken)


def test_the_update_must_come_last():
    broken = draw("0F0 0SF0 0RB0 0U 0B0", "1RF0 1F0 1B0 1SB0 1U")
    assert "the update of stage 0 must come last" in refusal(broken, 1)
    assert "0RB0 [0U] 0B0" in refusal(broken, 1)


def test_too_many_forwards_in_flight_are_refused():
    message = refusal(VALID, in_flight=[1, 1])
    assert "stage 0 has 2 forwards in flight, its bound is 1" in message
    assert "0F0 0SF0 [0F1]" in message


def test_a_deadlock_names_its_cycle_and_marks_who_waits():
    broken = draw(
        "0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1 0U",
        "1RF0 1F0 1SF0 1RF1 1F1 1SF1 1RB0 1B0 1SB0 1RB1 1B1 1SB1 1U",
        "2RF0 2F0 2B0 2SB0 2RF1 2F1 2B1 2SB1 2U",
    )
    assert refusal(broken) == (
        "deadlock: worker 0 waits in 0RB0 for worker 1, worker 1 waits in 1RF1 for worker 0\n"
        "worker 0: 0F0 0SF0 [0RB0] 0B0 0F1 0SF1 0RB1 0B1 ...\n"
        "worker 1: 1RF0 1F0 1SF0 [1RF1] 1F1 1SF1 1RB0 1B0 1SB0 ...\n"
        "worker 2: 2RF0 2F0 2B0 2SB0 [2RF1] 2F1 2B1 2SB1 2U"
    )


def test_tied_gradients_must_be_sent_and_received():
    tied = generate("gpipe", 2, 1, tied=[(0, [1])])
    unheard = (tuple(a for a in tied[0] if str(a) != "0RG1"), tied[1])
    assert "1SG0 is never received" in refusal(unheard, 1)
    unsent = (tied[0], tuple(a for a in tied[1] if str(a) != "1SG0"))
    assert "0RG1 receives from stage 1, which sends nothing more" in refusal(unsent, 1)


@pytest.mark.parametrize(
    ("row", "drop", "before", "message"),
    [
        (0, "0SP1@1", None, "0F1 comes before 0SP1@1, which it needs"),
        (1, "1RP0@1", None, "1F1 comes before 1RP0@1, which it needs"),
        (1, "1SG0@1", None, "1U1 comes before 1SG0@1, which it needs"),
        (0, "0RG1", None, "0U comes before 0RG1, which it needs"),
        (0, "0RG1@1", "0B1", "0RG1@1 comes before 0B1, which it needs"),
        (0, "0SP1@1", "0SP1@2", "0F1 comes before 0SP1@1, which it needs"),
        (1, "1RP0@1", "1RF0", "1RP0@1 receives from stage 0, which sends F0 at that turn"),
    ],
)
def test_a_stream_of_tied_parameters_must_be_whole(row, drop, before, message):
    """Remove an action, and put it elsewhere."""
    rows = [list(own) for own in generate("pipedream", 2, 1, mini_batches=3, tied=[(0, [1])])]
    rows[row].remove(moved := Action.parse(drop))
    if before is not None:
        rows[row].insert(rows[row].index(Action.parse(before)), moved)
    with pytest.raises(ScheduleError, match=message):
        validate([*map(tuple, rows)], 1, mini_batches=3, flushes=False)


def test_a_stage_is_on_one_worker_and_numbers_have_no_gaps():
    assert "stage 0 is on workers 0 and 1" in refusal(draw("0F0 0B0", "0U"), 1)
    assert "stages are [0, 2]" in refusal(draw("0F0 0B0 0U", "2F0 2B0 2U"), 1)


# An independent check: the actions, the order on every edge, and one graph of all precedences.

LOCAL = [  # (before, after) within a stage and micro-batch, if both exist
    ("RF", "F"), ("F", "SF"), ("F", "B"), ("RB", "B"), ("B", "SB"),
    ("F", "I"), ("RB", "I"), ("I", "SB"), ("I", "W"), ("F", "SK"), ("RK", "B"), ("B", "SV"),
]  # fmt: skip


def can_run(schedule, complete):
    """Return whether a schedule with these complete actions can run correctly."""
    cells = [action for row in schedule for action in row]
    if Counter(cells) != Counter(complete):
        return False
    edges = defaultdict(lambda: ([], []))
    graph = defaultdict(set)
    for row in schedule:
        at = {action: index for index, action in enumerate(row)}
        if not all(is_ordered([a for a in row if a.stage == n]) for n in {a.stage for a in row}):
            return False
        for before, after in itertools.pairwise(row):
            graph[after].add(before)
        for action in row:
            if action.message:
                lanes = 3 if action.message.source == action.message.target else 2
                edges[action.message[:lanes]][action.op.is_receive].append(action.message)
            name, number = action.op.value, action.number
            later = [
                Action(action.stage, type(action.op)(b), number) for a, b in LOCAL if a == name
            ]
            if any(other in at and at[other] < at[action] for other in later):
                return False
    sends = {action.message: action for action in cells if action.op.is_send}
    for action in cells:
        if action.op.is_receive:
            graph[action].add(sends[action.message])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return all(sent == received for sent, received in edges.values())


def is_ordered(row):
    """Check the order: passes, tied gradients, update, tied parameters; transfers before the
    update."""
    names = [action.op.value for action in row]
    kinds = ["FBIW", "G", "U", "P"]
    ranks = [
        next(rank for rank, kind in enumerate(kinds) if name[-1] in kind)
        for name in names
        if len(name) == 1 or name[-1] in "GP"
    ]
    transfers = [i for i, name in enumerate(names) if len(name) == 2 and name[-1] in "FBKV"]
    update = names.index("U") if "U" in names else len(names)
    return ranks == sorted(ranks) and all(i < update for i in transfers)


CASES = [
    ("1f1b", 3, 3, {}),
    ("1f1b", 2, 4, {"in_flight": [3, 1]}),
    ("gpipe", 3, 2, {}),
    ("1f1b", 3, 2, {"tied": [(0, [2])]}),
    ("zb-h1", 3, 3, {}),
    ("zb-h1", 3, 2, {"tied": [(0, [2])]}),
    ("interleaved", 4, 2, {"workers": 2}),
    ("zb-v", 4, 2, {"workers": 2, "tied": [(1, [0, 3])]}),
    ("fbp", 2, 4, {"in_flight": [3, 1]}),
    ("fbp", 3, 2, {"tied": [(0, [2])]}),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "options"), CASES)
def test_dropped_and_repeated_actions_are_refused(name, stages, microbatches, options):
    valid = generate(name, stages, microbatches, **options)
    for worker, row in enumerate(valid):
        for i in range(len(row)):
            for changed in (row[:i] + row[i + 1 :], row[: i + 1] + row[i:]):
                mutant = (*valid[:worker], changed, *valid[worker + 1 :])
                with pytest.raises(ScheduleError):
                    validate(mutant, microbatches)


@pytest.mark.parametrize(("name", "stages", "microbatches", "options"), CASES)
def test_swapped_actions_are_refused_if_they_must_be(name, stages, microbatches, options):
    valid = generate(name, stages, microbatches, **options)
    complete = [action for row in valid for action in row]
    verdicts = Counter()
    for worker, row in enumerate(valid):
        for j in range(len(row)):
            for i in range(j):
                changed = (*row[:i], row[j], *row[i + 1 : j], row[i], *row[j + 1 :])
                mutant = (*valid[:worker], changed, *valid[worker + 1 :])
                try:
                    validate(mutant, microbatches)
                    accepted = True
                except ScheduleError:
                    accepted = False
                assert accepted == can_run(mutant, complete), (str(row[i]), str(row[j]))
                verdicts[accepted] += 1
    assert verdicts[True] > 0  # a send may move behind a receive
    assert verdicts[False] > verdicts[True]


def mutants(valid):
    """Yield schedules with two actions of a row swapped, or one dropped, repeated or moved
    elsewhere."""
    for worker, row in enumerate(valid):
        changes = [row[:i] + row[i + 1 :] for i in range(len(row))]
        changes += [row[: i + 1] + row[i:] for i in range(len(row))]
        changes += [
            (*row[:i], row[j], *row[i + 1 : j], row[i], *row[j + 1 :])
            for j in range(len(row))
            for i in range(j)
        ]
        for changed in changes:
            yield (*valid[:worker], changed, *valid[worker + 1 :])
        for i, action in enumerate(row):
            rest = [list(own) for own in valid]
            del rest[worker][i]
            rest[(worker + 1) % len(rest)].append(action)
            yield tuple(map(tuple, rest))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "microbatches", "options"), CASES)
def test_tables_accept_the_same_schedules_as_the_validator(
    name, stages, microbatches, options, monkeypatch
):
    valid = generate(name, stages, microbatches, **options)
    plain = name != "fbp" and "tied" not in options
    monkeypatch.setattr(validator, "is_valid", lambda *arguments: False)
    verdicts = Counter()
    shallow = [max(1, depth - 1) for depth in max_in_flight(valid)]
    for mutant in (valid, *mutants(valid)):
        for bound in (None, shallow):
            try:
                validate(mutant, microbatches, bound)
                accepted = True
            except ScheduleError:
                accepted = False
            verdicts[accepted] += 1
            assert is_valid(mutant, microbatches, bound) == (accepted and plain), mutant
    assert verdicts[True] > 1
    assert verdicts[False] > verdicts[True]
