"""The planners: each is a module with the function `plan(costs, cluster, options) -> Plan`.

The function `proposals` of a paper's planner yields the pipelines that the paper would choose or
consider. One cost model and one simulator price all proposals (`hetpipe.plan.priced`).
"""
