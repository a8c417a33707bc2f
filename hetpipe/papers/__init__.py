"""Programs that reproduce a table or a figure of a paper."""
