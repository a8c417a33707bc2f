"""Studies: plans and predictions for clusters whose devices are attached, or only described.

The functions have the names of the commands: `plan`, `simulate`, `compare`, `whatif`, `capacity`,
`failures`, `coverage`. They need devices only to measure, except that `coverage` opens the device
it judges. `explain` tells where the time of a plan goes.
"""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.explain.explanation import explain as explain
    from hetpipe.plan.simulation import simulate as simulate
    from hetpipe.study.changes import whatif as whatif
    from hetpipe.study.comparison import Comparison as Comparison
    from hetpipe.study.comparison import compare as compare
    from hetpipe.study.lacking import coverage as coverage
    from hetpipe.study.largest import capacity as capacity
    from hetpipe.study.models import of_file as of_file
    from hetpipe.study.models import of_model as of_model
    from hetpipe.study.subject import Subject as Subject
    from hetpipe.study.subject import plan as plan
    from hetpipe.study.survivors import failures as failures
else:
    __getattr__, __dir__ = lazy(__name__)
