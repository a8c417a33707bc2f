"""Checkpoints on disk: a complete training state, for any plan and any devices."""
