"""Linear layers over a tensor-parallel group: `op.py` registers the ops, `functional.py` has their entries."""
