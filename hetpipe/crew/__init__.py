"""The controller of the workers: starts them, gives each its stages, hands out mini-batches."""
