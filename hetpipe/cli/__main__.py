"""`python -m hetpipe.cli`."""

from hetpipe.cli import main

main()
