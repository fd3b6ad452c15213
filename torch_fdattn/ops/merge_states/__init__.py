"""Combining partial attention states: `reference.py` defines it, `op.py` registers it."""
