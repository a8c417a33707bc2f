"""One worker: its process, the commands that it obeys, and the stages that it runs."""
