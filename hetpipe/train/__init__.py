"""Trains workloads on pipelines, and compares losses and gradients with unpartitioned torch."""
