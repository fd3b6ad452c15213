"""Attention over packed sequences: `reference.py` defines it, `op.py` registers it; its kernels are attention's."""
