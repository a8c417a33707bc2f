"""Explains a training: what each device does in a step, and which change would save time."""
