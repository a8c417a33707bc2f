"""Tables of four papers beside our figures, which the planners and the simulator compute.

Each paper has a file. For each of the paper's tables, the file has a function from the folder of
published data to a title and rows.
"""
