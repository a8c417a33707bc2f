"""Measures what every layer costs on every device, and every link; keeps the costs on disk."""
