"""Plans: who does which layers, in what order, and what it should cost; the planners that choose.

Free of torch: a plan for a cluster that nobody has is made in a blink.
"""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Plan": "plan",
        "StagePlan": "plan",
        "even_plan": "baselines",
        "explore": "planner",
        "make_plan": "planner",
        "predict": "pricing",
        "read_plan": "file",
        "speed_blind_plan": "baselines",
        "write_plan": "file",
    },
)
