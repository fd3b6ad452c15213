"""`options={"context_parallel": …}`: attention over the tokens, or over the KV cache, of all ranks.

attention       the option, ring attention, and calls of our own ops
sharded_cache   steps over a KV cache that ranks share
"""
