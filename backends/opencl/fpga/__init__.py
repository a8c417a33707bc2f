"""Products and convolutions for FPGAs: dataflows of single work-items, joined by channels."""
