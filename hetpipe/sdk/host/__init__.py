"""Finds, checks and runs backends on behalf of hetpipe; authors of backends do not need it."""
