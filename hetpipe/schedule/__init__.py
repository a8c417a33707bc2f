"""Schedules: actions, the generators that order them, and the validator that checks them.

The engine runs, and the simulator prices, exactly what `generate` returns. The validator is
`hetpipe.schedule.validate.validate`.
"""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Action": "action",
        "Message": "action",
        "Op": "action",
        "Rule": "rule",
        "Schedule": "action",
        "format_grid": "grid",
        "generate": "generators",
        "gpipe": "straight",
        "is_asynchronous": "rule",
        "is_chunked": "rule",
        "max_in_flight": "generators",
        "one_f_one_b": "straight",
        "parse_schedule": "text",
        "print_schedule": "text",
        "register_file": "fixed",
        "register_schedule": "rule",
        "register_text": "fixed",
        "rule_of": "rule",
        "schedule_names": "rule",
    },
)
