"""The bench where kernels are tested: a user's own, on every device that runs such files."""
