"""`options={"context_parallel": …}`: a graph over one rank's tokens, whose attention is of all ranks' tokens.

    options         what the option may hold
    ring            attention over tokens as ring attention
    sharded_cache   steps over a KV cache that ranks share
    local_masks     masks of local positions as masks of all tokens
    local_counts    what a model counts by local tokens, refused
    token_mixing    what else mixes or counts a rank's tokens, refused
    token_dims      which dims run over tokens
    mixing_operations    the operations that mix tokens, by families
    checkpoints     what checkpoints cannot run again, refused
    agreement       whether all ranks' graphs attend alike, seen when they run
    positions       whether positions are the shard's, seen when the graph runs
    fdattn_calls    calls of our own ops, which become either

The meaning is that of `dist.context_parallel`: SDPA and `torch_fdattn.attention` over q, k and v of this rank's
tokens become ring attention. What it cannot answer has the reason "context-parallel", and no attention at all
may stay as it was, since that would attend to this rank's tokens alone. With "cache", few queries over more keys
are a step over a cache that ranks share.

A mask that the graph makes of indices of local tokens is refused even where it is causal: a window or a chunk that is
longer than the shard hides nothing there, and so it cannot be told from a mask that has none. One that it makes of an
input's positions, as transformers' models do, is understood (`local_masks`), and the positions are checked.
"""
