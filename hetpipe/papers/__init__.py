"""What reproduces a table or a figure of a paper."""
