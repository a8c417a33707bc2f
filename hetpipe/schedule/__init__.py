"""Schedules: actions, the generators that order them, and the validator that checks them.

A crew runs exactly the schedule that `generate` returns, and the simulator prices the same
schedule. The validator is `hetpipe.schedule.validate.validate`.
"""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.schedule.action import Action as Action
    from hetpipe.schedule.action import Schedule as Schedule
    from hetpipe.schedule.fixed import register_text as register_text
    from hetpipe.schedule.generators import generate as generate
    from hetpipe.schedule.rule import Rule as Rule
    from hetpipe.schedule.rule import register_schedule as register_schedule
    from hetpipe.schedule.rule import schedule_names as schedule_names
    from hetpipe.schedule.text import parse_schedule as parse_schedule
    from hetpipe.schedule.text import print_schedule as print_schedule
else:
    __getattr__, __dir__ = lazy(__name__)
