"""Benchmarks for developers; pytest does not collect them.

Run one in the root of the repository: `PYTHONPATH=tests python -m benchmarks.planners --help`.
"""
