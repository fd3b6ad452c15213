"""`flash_attn.flash_attn_interface`: the functions of FlashAttention-2, and two names that its tests import from there."""

from torch_fdattn.dropins.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from torch_fdattn.dropins.flash_attn.kvcache import flash_attn_with_kvcache
from torch_fdattn.dropins.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "USE_TRITON_ROCM",
    "_get_block_size_n",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: What the package `flash_attn` has too.
FUNCTIONS = [name for name in __all__ if name.startswith("flash_attn")]
USE_TRITON_ROCM = False


def _get_block_size_n(device, head_dim, is_dropout, is_causal) -> int:
    """Keys of which the probabilities of return_attn_probs share one largest score: a row's all."""
    return 2**31
