"""The planners: each is a module with the function `plan(costs, cluster, options) -> Plan`.

Each module's `proposals` yields the pipelines that its paper would choose or consider. One cost
model and one simulator price the proposals of all planners (`hetpipe.plan.priced`).
"""
