"""Attention over a sequence sharded over ranks: `op.py` registers it, each strategy is a file.

`plan.py` turns shards and mask into kernel calls (host only), `local.py` runs them.
"""
