"""Workloads by name: models, their losses and their data."""
