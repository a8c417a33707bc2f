"""Bytes between processes: messages, wires between stages, and what carries them."""
