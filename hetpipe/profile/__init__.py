"""Measures every layer on every device, and every link; keeps the costs on disk."""
