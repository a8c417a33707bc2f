"""Notes on devices that a plan does not use."""

from __future__ import annotations

from tables import MIB, make_table

from hetpipe.plan.planner import make_pipeline, with_notes
from hetpipe.plan.proposal import PlannerOptions

TABLES = {4: make_table({"a": 1.0, "b": 0.05}, samples=4)}
OPTIONS = PlannerOptions(16)


def test_a_note_compares_with_the_best_pipeline_of_the_omitted_device() -> None:
    alone = make_pipeline(TABLES, ["a"], OPTIONS)
    both = make_pipeline(TABLES, ["a", "b"], OPTIONS)
    (note,) = with_notes(alone, TABLES, ["a", "b"], OPTIONS).notes
    assert note == (
        "b is left out: a step without it is predicted to take "
        f"{1e3 * alone.step_s:.2f} ms, with it {1e3 * both.step_s:.2f} ms at best, with a stage on "
        f"each of {both.all_devices[0]}, {both.all_devices[1]}"
    )
    assert with_notes(both, TABLES, ["a", "b"], OPTIONS).notes == ()


def test_a_note_says_if_no_pipeline_of_the_device_is_possible() -> None:
    tables = {4: make_table({"a": 1.0, "b": 0.05}, samples=4, memory=5 * MIB, layers=1)}
    alone = make_pipeline(TABLES, ["a"], OPTIONS)
    (note,) = with_notes(alone, tables, ["a", "b"], OPTIONS).notes
    assert note == "b is left out: no plan with a stage on each of a, b is possible"


def test_a_note_keeps_the_given_number_of_micro_batches() -> None:
    """Three micro-batches of four samples: no power of two gives this size."""
    options = PlannerOptions(12, (3,))
    alone = make_pipeline(TABLES, ["a"], options)
    (note,) = with_notes(alone, TABLES, ["a", "b"], options).notes
    assert "at best, with a stage on each of" in note
