"""Moves bytes between processes: messages, wires between stages, and their transports."""
