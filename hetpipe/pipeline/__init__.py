"""The user's side: options, planning, training, checkpoints of one pipeline."""
