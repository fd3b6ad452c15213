"""Attention of float8 tensors with scales, forward alone: `reference.py` defines it, `op.py` registers it."""
