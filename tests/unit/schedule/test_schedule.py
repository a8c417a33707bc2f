"""Schedules as staircases of text, without a device."""

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Op
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.rule import is_asynchronous, register_schedule, rule_of, schedule_names
from hetpipe.schedule.straight import gpipe, naive, one_f_one_b, one_f_one_b_sno, one_f_one_b_so
from hetpipe.schedule.text import format_grid


def passes(schedule):
    """Return `F0 B0 ...` per stage, without transfers."""
    return [
        " ".join(str(a)[1:] for a in row if a.op in (Op.FORWARD, Op.BACKWARD)) for row in schedule
    ]


def text(schedule):
    return [" ".join(str(action)[1:] for action in row) for row in schedule]


def test_gpipe_is_all_forwards_then_all_backwards():
    assert passes(gpipe(3, 3)) == ["F0 F1 F2 B0 B1 B2"] * 3


def test_one_f_one_b_is_a_staircase():
    assert passes(one_f_one_b(4, 5)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_one_f_one_b_with_fewer_microbatches_than_stages():
    assert passes(one_f_one_b(3, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_in_flight_sets_the_warm_up():
    assert passes(one_f_one_b(3, 4, [5, 3, 1])) == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_naive_is_one_micro_batch_at_a_time():
    assert passes(naive(3, 2)) == ["F0 B0 F1 B1"] * 3
    assert max_in_flight(generate("naive", 3, 5)) == [1, 1, 1]


def test_so_starts_twice_as_deep_as_sno():
    assert passes(one_f_one_b_sno(2, 3)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert passes(one_f_one_b_so(2, 5)) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    ]


def test_a_bound_lowers_the_depth_of_sno_and_so_but_does_not_raise_it():
    assert max_in_flight(generate("1f1b-so", 3, 8, in_flight=[5, 5, 1])) == [5, 4, 1]
    assert max_in_flight(generate("1f1b-sno", 3, 8, in_flight=[5, 1, 1])) == [3, 1, 1]


def test_transfers_surround_the_passes_that_need_them():
    assert text(generate("1f1b", 3, 2)) == [
        "F0 SF0 F1 SF1 RB0 B0 RB1 B1 U",
        "RF0 F0 SF0 RF1 F1 SF1 RB0 B0 SB0 RB1 B1 SB1 U",
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1 U",
    ]


def test_a_single_stage_has_no_transfers():
    assert text(generate("gpipe", 1, 2)) == ["F0 F1 B0 B1 U"]


def test_the_owner_sums_tied_gradients_and_sends_parameters_back():
    rows = text(generate("gpipe", 4, 1, tied=[(0, [2, 3]), (1, (3,)), (0, (3,))]))
    assert [row[row.index(" B0") + 1 :] for row in rows] == [
        "B0 RG2 RG3 U SP2 SP3",
        "B0 SB0 RG3 U SP3",
        "B0 SB0 SG0 U RP0",
        "B0 SB0 SG0 SG1 U RP0 RP1",
    ]


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_depths_match_the_papers(stages, microbatches):
    straight = [min(stages - n, microbatches) for n in range(stages)]
    hiding = [min(2 * (stages - n) - 1, microbatches) for n in range(stages)]
    assert max_in_flight(generate("1f1b", stages, microbatches)) == straight
    assert max_in_flight(generate("1f1b", stages, microbatches, in_flight=hiding)) == hiding
    assert max_in_flight(generate("gpipe", stages, microbatches)) == [microbatches] * stages
    for name in ("1f1b-sno", "1f1b-as"):
        assert max_in_flight(generate(name, stages, microbatches)) == straight
    twice = [min(2 * (stages - n), microbatches) for n in range(stages)]
    assert max_in_flight(generate("1f1b-so", stages, microbatches)) == twice


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f2b", 2, 2), {}, "no schedule '1f2b'; did you mean 1f1b"),
        (("1f1b", 0, 2), {}, "0 stages, 2 micro-batches"),
        (("1f1b", 2, 0), {}, "2 stages, 0 micro-batches"),
        (("1f1b", 2, 2), {"in_flight": [1]}, r"in_flight \[1\]: give one number"),
        (("1f1b", 2, 2), {"in_flight": [1, 0]}, "at least 1"),
        (("gpipe", 2, 4), {"in_flight": [2, 2]}, "keeps all 4 micro-batches in flight, but 2"),
        (("1f1b", 2, 2), {"tied": [(0, [2])]}, "tied stages 0 and 2"),
        (("1f1b", 2, 2), {"tied": [(1, [1])]}, "tied stages 1 and 1"),
        (("1f1b", 2, 2), {"mini_batches": 2}, "2 mini-batches: 1f1b flushes after each"),
        (("pipedream", 2, 2), {"mini_batches": 0}, "0 mini-batches: must be 1 or more"),
        (("pipedream", 2, 2), {"tied": [(1, [0])]}, "the first stage with a parameter must own it"),
        (
            ("pipedream", 3, 1),
            {"tied": [(0, [2])], "replicas": [1, 1, 2]},
            "stages 0 and 2 share parameters, and stage 2 has 2 replicas, which take turns",
        ),
        (("1f1b", 4, 2), {"workers": 2}, "4 stages on 2 workers: 1f1b takes one stage per worker"),
        (("interleaved", 2, 4), {"workers": 4}, "takes at least one stage per worker"),
        (("interleaved", 2, 4), {"workers": 0}, "2 stages on 0 workers"),
        (("interleaved", 5, 4), {"workers": 2}, "its 2 workers, not 5 stages; use 4 or 6"),
        (("interleaved", 6, 7), {"workers": 3}, "not 7 micro-batches; use 6 or 9"),
        (("interleaved", 6, 2), {"workers": 3}, "not 2 micro-batches; use 3"),
        (("zb-v", 3, 4), {"workers": 2}, "cut into 4 for 2 workers, not into 3"),
        (("zb-v", 4, 4), {}, "cut into 8 for 4 workers, not into 4"),
    ],
)
def test_invalid_arguments_are_refused(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        generate(*arguments, **options)


def test_a_deadlock_of_in_flight_depths_is_found_when_generated():
    with pytest.raises(ScheduleError, match="deadlock: worker 0 waits in 0RB0 for worker 1, "):
        generate("1f1b", 2, 4, in_flight=[1, 2])


def test_users_can_register_schedules(monkeypatch):
    import hetpipe.schedule.rule as module

    monkeypatch.setattr(module, "_rules", dict(module._rules))

    @register_schedule("mine")
    def mine(stages, microbatches, in_flight):
        """Return rows that run one micro-batch at a time."""
        ops = (Op.FORWARD, Op.BACKWARD)
        row = [(op, m) for m in range(microbatches) for op in ops]
        return tuple(tuple(Action(n, op, m) for op, m in row) for n in range(stages))

    assert {"mine", "1f1b", "pipedream"} < set(schedule_names())
    assert text(generate("mine", 2, 2))[1] == "RF0 F0 B0 SB0 RF1 F1 B1 SB1 U"
    for name in ("mine", "gpipe"):
        with pytest.raises(ScheduleError, match=f"'{name}' is registered already"):
            register_schedule(name)(one_f_one_b)


def test_the_registered_schedules():
    assert schedule_names() == [
        "1f1b", "1f1b-as", "1f1b-sno", "1f1b-so", "asp", "data-parallel", "fbp", "gpipe",
        "interleaved", "naive", "pipedream", "zb-h1", "zb-v",
    ]  # fmt: skip
    assert [name for name in schedule_names() if is_asynchronous(name)] == ["asp", "pipedream"]
    assert [name for name in schedule_names() if rule_of(name).several_stages] == [
        "data-parallel", "interleaved", "zb-v",
    ]  # fmt: skip


def test_stages_on_one_worker_hand_over_with_the_same_actions(monkeypatch):
    import hetpipe.schedule.rule as module

    monkeypatch.setattr(module, "_rules", dict(module._rules))
    row = "0F0 1F0 1B0 0B0"
    register_schedule("one", chunked=True)(
        lambda n, m, k, workers: (tuple(map(Action.parse, row.split())),)
    )
    assert format_grid(generate("one", 2, 1, workers=1)) == (
        "worker 0: 0F0 0SF0 1RF0 1F0 1B0 1SB0 0RB0 0B0 0U 1U"
    )


def test_tied_parameters_of_stages_on_one_worker():
    """Stages 0 and 3 are on worker 0. If it awaited stage 0's parameter before it sends stage 3's
    gradient, it would wait for ever."""
    rows = text(generate("zb-v", 4, 1, workers=2, tied=[(1, [0, 3])]))
    assert [row.partition("W0 ")[2].rpartition("W0 ")[2] for row in rows] == [
        "SG1 SG1 U U RP1 RP1",
        "RG0 RG3 U U SP0 SP3",
    ]


def test_pipedream_continues_with_the_next_mini_batch():
    assert text(generate("pipedream", 2, 1, mini_batches=3)) == [
        "F0 SF0 F1 SF1 RB0 B0 U F2 SF2 RB1 B1 U1 RB2 B2 U2",
        "RF0 F0 B0 SB0 U RF1 F1 B1 SB1 U1 RF2 F2 B2 SB2 U2",
    ]
    rows = text(generate("pipedream", 2, 2, mini_batches=2, in_flight=[3, 1]))
    assert rows[0] == "F0 SF0 F1 SF1 F2 SF2 RB0 B0 F3 SF3 RB1 B1 U RB2 B2 RB3 B3 U1"


def test_pipedream_sends_the_tied_parameter_before_each_forward_of_its_owner():
    rows = text(generate("pipedream", 3, 1, mini_batches=3, tied=[(0, [2])]))
    assert rows[0] == (
        "SP2 F0 SF0 SP2@1 F1 SF1 SP2@2 F2 SF2 RB0 B0 RG2 U RB1 B1 RG2@1 U1 RB2 B2 RG2@2 U2 SP2@3"
    )
    assert rows[2] == (
        "RP0 RF0 F0 B0 SB0 SG0 U RP0@1 RF1 F1 B1 SB1 SG0@1 U1 RP0@2 RF2 F2 B2 SB2 SG0@2 U2 RP0@3"
    )
    rows = text(generate("pipedream", 2, 2, mini_batches=1, tied=[(0, [1])]))
    assert rows[1] == "RP0 RF0 F0 B0 SB0 RF1 F1 B1 SB1 SG0 U RP0@1"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream", "zb-h1"])
def test_actions_print_and_parse(name):
    mini_batches = 3 if name == "pipedream" else 1
    for row in generate(name, 4, 12, tied=[(0, [3])], mini_batches=mini_batches):
        for action in row:
            assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "wrong", ["F0", "2F", "0UF1", "2X0", "2F0 ", "", "-1F0", "2F0@1", "0SP@1", "0SP2@"]
)
def test_invalid_actions_do_not_parse(wrong):
    with pytest.raises(ScheduleError):
        Action.parse(wrong)


@pytest.mark.parametrize(
    ("send", "receive", "message"),
    [
        ("1SF3", "2RF3", Message(1, 2, "F", 3)),
        ("2SB3", "1RB3", Message(2, 1, "B", 3)),
        ("2SG0", "0RG2", Message(2, 0, "G", 0)),
        ("0SP2", "2RP0", Message(0, 2, "P", 0)),
    ],
)
def test_a_send_and_its_receive_name_one_message(send, receive, message):
    assert Action.parse(send).message == Action.parse(receive).message == message
    assert Action.parse(send).op.is_send
    assert Action.parse(receive).op.is_receive


def test_the_grid_shows_the_actions_around_marks():
    schedule = generate("1f1b", 2, 4)
    assert format_grid(schedule, {1: 7}) == (
        "worker 0: ... 0F1 0SF1 0RB0 0B0 0F2 0SF2 0RB1 0B1 0F3 0SF3 0RB2 ...\n"
        "worker 1: ... 1B0 1SB0 1RF1 1F1 1B1 [1SB1] 1RF2 1F2 1B2 1SB2 1RF3 ..."
    )
