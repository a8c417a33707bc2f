"""Checks of hetpipe on a machine with a card: `python -m tests.card --out DIR`.

See docs/cards.md.
"""
