"""Workbench for kernels: tests a user's kernels on every device that can run them."""
