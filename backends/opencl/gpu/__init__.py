"""Products and convolutions for GPUs, by tiles in local memory."""
