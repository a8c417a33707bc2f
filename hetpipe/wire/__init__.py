"""Bytes between processes: messages of the controller, wires between stages, and the transports that carry them."""
