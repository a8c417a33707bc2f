"""Products and convolutions for FPGAs: kernels of one work-item, joined by channels."""
