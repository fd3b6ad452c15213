"""Writing new keys and values into a cache: `reference.py` defines it, `op.py` registers it."""
