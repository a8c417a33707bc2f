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
        "Schedule": "action",
        "format_grid": "grid",
        "generate": "generators",
        "gpipe": "straight",
        "is_asynchronous": "generators",
        "is_chunked": "generators",
        "max_in_flight": "generators",
        "one_f_one_b": "straight",
        "parse_schedule": "text",
        "print_schedule": "text",
        "register_file": "fixed",
        "register_schedule": "generators",
        "register_text": "fixed",
        "schedule_names": "generators",
    },
)
