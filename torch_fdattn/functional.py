"""The Python entries of the ops on one device, from the `entry.py` of each family of kernels."""

from torch_fdattn.ops.append_kv.entry import append_kv, paged_append_kv
from torch_fdattn.ops.attention.entry import attention
from torch_fdattn.ops.attention_fp8.entry import attention_fp8
from torch_fdattn.ops.attention_fp8.reference import quantise_per_head
from torch_fdattn.ops.decode.entry import decode, decode_workspace, paged_decode
from torch_fdattn.ops.merge_states.entry import merge_states
from torch_fdattn.ops.options import window_bounds
from torch_fdattn.ops.varlen_attention.entry import varlen_attention

__all__ = [
    "append_kv",
    "attention",
    "attention_fp8",
    "decode",
    "decode_workspace",
    "merge_states",
    "paged_append_kv",
    "paged_decode",
    "quantise_per_head",
    "varlen_attention",
    "window_bounds",
]
