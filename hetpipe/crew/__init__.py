"""The controller: starts the workers, gives each worker its stages, and hands out mini-batches."""
