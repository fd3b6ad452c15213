"""torch_fdattn: flash attention and flash decode for PyTorch, on one device and over many.

Importing registers the ops under ``torch.ops.fdattn``; it needs no GPU and compiles nothing.
"""

from torch_fdattn import dist, dropins, ops
from torch_fdattn.compile_backend import explain
from torch_fdattn.functional import (
    append_kv,
    attention,
    decode,
    decode_workspace,
    merge_states,
    paged_append_kv,
    paged_decode,
    varlen_attention,
)
from torch_fdattn.ops.attention.tuning import autotune, tiles
from torch_fdattn.ops.determinism import set_deterministic
from torch_fdattn.version import __version__

__all__ = [
    "__version__",
    "append_kv",
    "attention",
    "autotune",
    "decode",
    "decode_workspace",
    "dist",
    "dropins",
    "explain",
    "merge_states",
    "ops",
    "paged_append_kv",
    "paged_decode",
    "set_deterministic",
    "tiles",
    "varlen_attention",
]

dropins.register_flash_impl()
