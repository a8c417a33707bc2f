"""Workbench for kernels: tests a user's kernels on every device that runs such files."""
