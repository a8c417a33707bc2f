"""Notes on devices that a plan leaves out."""

from __future__ import annotations

from tables import MIB, make_table

from hetpipe.plan.planner import make_pipeline
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.plan.unused import with_notes

TABLES = {4: make_table({"a": 1.0, "b": 0.05}, samples=4)}


def test_a_note_compares_with_the_best_pipeline_of_the_omitted_device() -> None:
    alone = make_pipeline(TABLES, ["a"], PlannerOptions(16))
    both = make_pipeline(TABLES, ["a", "b"], PlannerOptions(16, schedules=(alone.schedule,)))
    (note,) = with_notes(alone, TABLES, ["a", "b"]).notes
    assert note == (
        "b is left out: a step without it is predicted to take "
        f"{1e3 * alone.step_s:.2f} ms, with it {1e3 * both.step_s:.2f} ms at best, with a stage on "
        f"each of {both.all_devices[0]}, {both.all_devices[1]}"
    )
    assert with_notes(both, TABLES, ["a", "b"]).notes == ()


def test_a_note_says_if_no_pipeline_of_the_device_is_possible() -> None:
    tables = {4: make_table({"a": 1.0, "b": 0.05}, samples=4, memory=5 * MIB, layers=1)}
    alone = make_pipeline(TABLES, ["a"], PlannerOptions(16))
    (note,) = with_notes(alone, tables, ["a", "b"]).notes
    assert note == "b is left out: no plan with a stage on each of a, b is possible"
