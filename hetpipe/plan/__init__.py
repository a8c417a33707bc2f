"""Plans and planners. Planning needs neither torch nor the devices of the cluster."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.plan.plan import Plan as Plan
    from hetpipe.plan.plan import StagePlan as StagePlan
    from hetpipe.plan.plan_file import read_plan as read_plan
    from hetpipe.plan.plan_file import write_plan as write_plan
else:
    __getattr__, __dir__ = lazy(__name__)
