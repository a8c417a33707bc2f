"""Tables of the four papers beside ours, computed by the planners and the simulator.

A file for each paper; each of its tables is a function from the folder of published data to rows.
"""
