"""Plans: the layers, order and predicted cost of each member's work; and the planners.

Planning needs neither torch nor the devices of the cluster.

"""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Plan": "plan",
        "Split": "split",
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
