"""Attention for prefill and training: `reference.py` defines it, `op.py` registers it."""
