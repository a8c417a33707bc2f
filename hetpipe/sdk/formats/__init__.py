"""File formats: bundles of kernels, specifications of kernels, and serialised graphs."""
