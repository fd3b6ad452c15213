"""Attention over many devices: KV caches and sequences sharded over a process group.

The docstrings' examples run on any number of processes, one included, after `torch.distributed.init_process_group`;
the group None is all of them.
"""

# Its functions take the group of all ranks for a default argument while it is imported. `torch._dynamo` and the optimizers
# import it: after `init_process_group` it would keep that group, and gloo's threads, beyond `destroy_process_group`.
import torch.distributed.nn.functional  # noqa: F401  # isort: skip

# The packages first: they register the ops, and their names are then taken by the functions of that name.
from torch_fdattn.dist.decode import op as _decode_op  # noqa: F401  # isort: skip
from torch_fdattn.dist.ring_attention import op as _ring_op  # noqa: F401  # isort: skip
from torch_fdattn.dist.tensor_parallel import op as _tensor_parallel_op  # noqa: F401  # isort: skip

from torch_fdattn.dist.decode.auto import chosen_strategy
from torch_fdattn.dist.functional import decode, one_sided_all_gather, ring_attention
from torch_fdattn.dist.kv_cache.decode_attention import DistributedDecodeAttention
from torch_fdattn.dist.kv_cache.mask_options import MaskOptions
from torch_fdattn.dist.kv_cache.shard_map import ShardMap
from torch_fdattn.dist.kv_cache.sharded_cache import ShardedKVCache
from torch_fdattn.dist.ring_attention.context_parallel import (
    context_parallel,
    shard_batch,
    unshard_batch,
)
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards
from torch_fdattn.dist.symm.faults import PeerTimeout, check, set_timeout
from torch_fdattn.dist.tensor_parallel.attention import TPAttention
from torch_fdattn.dist.tensor_parallel.functional import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    matmul_reduce_scatter,
)
from torch_fdattn.dist.tensor_parallel.layers import TPMLP

__all__ = [
    "TPMLP",
    "DistributedDecodeAttention",
    "MaskOptions",
    "PeerTimeout",
    "SequenceShards",
    "ShardMap",
    "ShardedKVCache",
    "TPAttention",
    "all_gather_matmul",
    "check",
    "chosen_strategy",
    "context_parallel",
    "decode",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "one_sided_all_gather",
    "ring_attention",
    "set_timeout",
    "shard_batch",
    "unshard_batch",
]
