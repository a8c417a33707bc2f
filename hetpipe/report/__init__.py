"""Output for people and programs: tables, pictures of timelines, JSON."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "cost_table": "tables",
        "device_table": "tables",
        "draw_timelines": "picture",
        "draw_workloads": "picture",
        "link_table": "tables",
        "write_trace": "trace",
    },
)
