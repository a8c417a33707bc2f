"""Runs launches on a device: programs, memory, queues and events."""
