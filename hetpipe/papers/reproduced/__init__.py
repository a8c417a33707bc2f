"""Tables of the four papers beside ours, which the planners and the simulator compute.

Each paper has a file, and each of its tables is a function from the folder of published data to
rows.
"""
