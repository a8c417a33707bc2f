"""Steps after export: a flat graph becomes pieces, and each piece the programs of a stage."""
