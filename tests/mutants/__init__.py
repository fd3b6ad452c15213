"""Planted faults: see `__main__.py`."""
