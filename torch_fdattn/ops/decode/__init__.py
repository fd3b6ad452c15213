"""Split-KV decode over preallocated caches: `reference.py` defines it, `op.py` registers it."""
