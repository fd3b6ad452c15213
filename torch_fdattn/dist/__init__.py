"""Attention over many devices: KV caches and sequences sharded over a process group."""

from torch_fdattn.dist.decode import op as _decode_op  # noqa: F401  (registers dist_decode)
from torch_fdattn.dist.functional import decode
from torch_fdattn.dist.kv_cache import ShardedKVCache
from torch_fdattn.dist.sharding import ShardMap

__all__ = ["ShardMap", "ShardedKVCache", "decode"]
