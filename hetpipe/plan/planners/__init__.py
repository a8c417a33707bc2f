"""The planners, a module each, behind one interface: `plan(costs, cluster, options) -> Plan`.

Each module has `proposals`, the pipelines that its paper would choose or weigh. What a proposal
costs is the same for all: one cost model and one simulator price it (`hetpipe.plan.proposal`).
"""
