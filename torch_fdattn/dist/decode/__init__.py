"""Decode over a sharded KV cache: `op.py` registers it, the other files are its strategies."""
